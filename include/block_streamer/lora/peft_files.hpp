// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/peft_config.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The configuration that an adapter's files carry.
/// @param base_model  path or hub name, for whoever loads the adapter; may be empty.
[[nodiscard]] inline PeftConfig peft_config_of(const LoraAdapter& adapter,
                                               const std::string& base_model) {
  const LoraOptions& options = adapter.options();
  PeftConfig config;
  config.base_model = base_model;
  config.rank = options.rank;
  config.alpha = options.alpha;
  config.dropout = options.dropout;
  config.use_rslora = options.use_rslora;
  config.target_modules = adapter.saved_targets().modules;
  config.layers_to_transform = adapter.saved_targets().layers;
  for (const LoraModule& module : adapter.modules()) {
    if (module.rank != options.rank)
      config.rank_pattern.emplace_back(module.site.module, module.rank);
    if (module.alpha != options.alpha)
      config.alpha_pattern.emplace_back(module.site.module, module.alpha);
  }
  return config;
}

namespace detail {
/// A folder for files in the making, beside their place; gone at the end of the scope.
class StagingFolder {
 public:
  StagingFolder(const std::filesystem::path& folder, const std::string& name)
      : path_{folder / name} {
    std::error_code error;
    std::filesystem::remove_all(path_, error);  // of a run that was killed
    std::filesystem::create_directories(path_, error);
    if (error) throw StorageError{folder.string(), "cannot make a folder for new files", error};
  }
  StagingFolder(const StagingFolder&) = delete;
  StagingFolder& operator=(const StagingFolder&) = delete;
  ~StagingFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

inline void move_file(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code error;
  std::filesystem::rename(from, to, error);
  if (error) throw StorageError{to.string(), "moving into place failed", error};
}

[[nodiscard]] inline bool holds_text(const std::filesystem::path& path, const std::string& text) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;
  try {
    return read_small_file(path, text.size()) == text;
  } catch (const Error&) {
    return false;
  }
}

inline void write_adapter_tensors(const std::filesystem::path& path, const LoraAdapter& adapter) {
  std::vector<at::Tensor> kept;  // on the host, dense
  std::vector<TensorBytes> tensors;
  for (const auto& [name, tensor] : adapter.named_parameters()) {
    kept.push_back(tensor.detach().to(at::kCPU).contiguous());
    tensors.push_back({.spec = {name, dtype_of(tensor.scalar_type()), shape_of(tensor)},
                       .bytes = bytes_of(kept.back())});
  }
  write_safetensors(path, tensors, {{"format", "pt"}});
}
}  // namespace detail

/// @brief Writes `adapter_config.json` and `adapter_model.safetensors` as PEFT does, into `folder`
/// (made if it is missing). The same adapter gives the same bytes.
/// Both files are written and made durable beside their place first, so a full disk or any other
/// failure of writing leaves the adapter that was there whole. A crash between the moves into place
/// leaves the old or the new pair, or tensors without a configuration, which loading refuses: never
/// a mixed pair.
/// @throws StorageError naming the path.
inline void save_adapter(const std::filesystem::path& folder, const LoraAdapter& adapter,
                         const std::string& base_model = {}) {
  const std::filesystem::path config_path = folder / "adapter_config.json";
  const std::string config = format_peft_config(peft_config_of(adapter, base_model));
  const detail::StagingFolder staging{folder, ".adapter-new"};
  atomic_replace(staging.path() / "adapter_config.json", config);
  detail::write_adapter_tensors(staging.path() / "adapter_model.safetensors", adapter);
  const bool same_config = detail::holds_text(config_path, config);
  std::error_code error;
  if (!same_config && (std::filesystem::remove(config_path, error), error))
    throw StorageError{config_path.string(), "cannot be replaced", error};
  detail::move_file(staging.path() / "adapter_model.safetensors",
                    folder / "adapter_model.safetensors");
  if (!same_config) detail::move_file(staging.path() / "adapter_config.json", config_path);
}

/// @brief True if the folder holds the files that save_adapter() would write: the same bytes.
[[nodiscard]] inline bool holds_adapter(const std::filesystem::path& folder,
                                        const LoraAdapter& adapter,
                                        const std::string& base_model = {}) {
  if (!detail::holds_text(folder / "adapter_config.json",
                          format_peft_config(peft_config_of(adapter, base_model)))) {
    return false;
  }
  try {
    const Checkpoint file = Checkpoint::open(folder / "adapter_model.safetensors");
    const auto parameters = adapter.named_parameters();
    if (file.tensors().size() != parameters.size()) return false;
    for (const auto& [name, tensor] : parameters) {
      const at::Tensor stored = load_tensor(file, name);
      const at::Tensor own = tensor.detach().to(at::kCPU).contiguous();
      if (stored.scalar_type() != own.scalar_type() || stored.sizes() != own.sizes()) return false;
      if (!std::ranges::equal(bytes_of(stored), bytes_of(own))) return false;
    }
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace block_streamer::inline v1
