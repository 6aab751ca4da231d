// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/safetensors_header.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/run_record.hpp>
#include <block_streamer/finetune/saved_run.hpp>
#include <block_streamer/optim/adamw_state.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

[[nodiscard]] inline std::uint32_t sum_of(const NamedTensors& tensors) {
  std::uint32_t sum = 0;
  for (const auto& [name, tensor] : tensors) {
    sum = crc32c(std::as_bytes(std::span{name}), sum);
    sum = crc32c(bytes_of(tensor), sum);
  }
  return sum;
}

/// Parameters and moments as they are written, on the host.
[[nodiscard]] inline NamedTensors state_tensors(const NamedTensors& parameters,
                                                const AdamW& optimizer) {
  std::vector<std::string> names;
  NamedTensors all;
  for (const auto& [name, tensor] : parameters) {
    names.push_back(name);
    all.push_back({"parameter." + name, tensor.detach().to(at::kCPU).contiguous()});
  }
  for (const auto& [name, tensor] : adamw_state(optimizer, names)) {
    all.push_back({"optimizer." + name, tensor.to(at::kCPU).contiguous()});
  }
  return all;
}

/// The order in which the sum of a state's tensors is taken.
inline void sort_by_name(NamedTensors& tensors) {
  std::ranges::sort(tensors, {}, &NamedTensor::name);
}

/// The sum of a state's tensors, read one after another.
[[nodiscard]] inline std::uint32_t sum_of_tensors(const Checkpoint& file) {
  std::uint32_t sum = 0;
  for (const StoredTensor& stored : file.tensors()) {  // sorted by name
    sum = crc32c(std::as_bytes(std::span{stored.spec.name}), sum);
    sum = crc32c(bytes_of(load_tensor(file, stored.spec.name)), sum);
  }
  return sum;
}

inline void expect_parameter(const std::filesystem::path& path, const Checkpoint& file,
                             const std::string& name, const at::Tensor& like) {
  const StoredTensor* const stored = file.find("parameter." + name);
  if (stored == nullptr) throw BindingError{path.string() + ": " + name + " is missing"};
  if (stored->spec.shape != shape_of(like) || stored->spec.dtype != dtype_of(like.scalar_type())) {
    throw BindingError{path.string() + ": " + name + " has another shape or type than here"};
  }
}

/// What of the state is the optimizer's. @throws BindingError for what is nobody's.
[[nodiscard]] inline std::set<std::string> optimizer_entries(const std::filesystem::path& path,
                                                             const Checkpoint& file,
                                                             std::set<std::string> parameters) {
  constexpr std::string_view own = "optimizer.", other = "parameter.";
  std::set<std::string> entries;
  for (const StoredTensor& stored : file.tensors()) {
    const std::string& name = stored.spec.name;
    if (name.starts_with(own)) {
      entries.insert(name.substr(own.size()));
    } else if (!name.starts_with(other) || parameters.erase(name.substr(other.size())) == 0) {
      throw BindingError{path.string() + ": " + name + " is unknown"};
    }
  }
  return entries;
}

}  // namespace detail

/// @brief Writes where a run stands as one file, which replaces the earlier state as a whole:
/// whenever the process dies, the old state is there or the new one.
/// At step 0 the tensors are left out: the run was begun and nothing is saved yet.
/// @param parameters  what trains, under the names that optimizer moments get too.
/// @throws StorageError naming the path; the earlier state is untouched then.
/// **Cost.** 12 bytes per trained element on the disk, and on the host for tensors of a device.
inline void save_training_state(const std::filesystem::path& path, const RunRecord& record,
                                const RunPosition& position, const NamedTensors& parameters,
                                const AdamW& optimizer) {
  NamedTensors tensors;
  if (position.step > 0) tensors = detail::state_tensors(parameters, optimizer);
  std::map<std::string, std::string> metadata{{"format", detail::state_format},
                                              {"step", std::to_string(position.step)},
                                              {"skipped", std::to_string(position.skipped)}};
  for (const auto& [name, value] : record.fields()) metadata.emplace("run " + name, value);
  detail::sort_by_name(tensors);
  metadata.emplace("crc32c", std::to_string(detail::sum_of(tensors)));
  metadata.emplace(detail::metadata_sum_key, std::to_string(detail::sum_of(metadata)));
  std::vector<TensorBytes> written;
  for (const auto& [name, tensor] : tensors) {
    written.push_back({.spec = {name, dtype_of(tensor.scalar_type()), shape_of(tensor)},
                       .bytes = bytes_of(tensor)});
  }
  write_safetensors(path, written, metadata);
}

/// @brief Takes up parameters and moments of a state whose step is not 0: the next step continues
/// the run bit for bit.
/// @param parameters  written in place; names, shapes and types are the saved ones.
/// @throws FormatError if bytes of the file have changed; BindingError naming a tensor that is
/// missing, unknown or of another shape or type. Nothing has changed then.
/// **Cost.** Reads the file twice; memory: the moments, and one tensor.
inline void load_training_state(const std::filesystem::path& path, const NamedTensors& parameters,
                                AdamW& optimizer) {
  const SafetensorsHeader header = read_safetensors_header(path);
  const Checkpoint file = Checkpoint::open(path);
  if (detail::sum_of_tensors(file) != detail::state_number(path, header.metadata, "crc32c")) {
    throw FormatError{path.string(),
                      "the file has changed since it was saved: its tensors have another crc32c"};
  }
  std::vector<std::string> names;
  std::vector<at::Tensor> targets;
  for (const auto& [name, tensor] : parameters) {
    detail::expect_parameter(path, file, name, tensor);
    names.push_back(name);
    targets.push_back(tensor);
  }
  load_adamw_state(optimizer, names, targets,
                   detail::optimizer_entries(path, file, {names.begin(), names.end()}),
                   [&](const std::string& name) { return load_tensor(file, "optimizer." + name); });
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < targets.size(); ++i)
    targets[i].copy_(load_tensor(file, "parameter." + names[i]));
}

}  // namespace block_streamer::inline v1
