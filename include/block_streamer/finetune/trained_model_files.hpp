// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/copied_files.hpp>
#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/checkpoint/shard_split.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/os/atomic_replace.hpp>
#include <block_streamer/os/file.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A checkpoint with trained values, as a Hugging Face folder: the tensors under their
/// names, types and shapes, those that did not train byte for byte, and the model's other files.
/// The same values give the same bytes.
/// **Lifetime.** Shares the trained tensors. **Threads.** As they: nobody writes them meanwhile.
class TrainedModelFiles {
 public:
  /// @param trained  by their names in the checkpoint, of its shapes, of any type and device.
  /// @param shard_byte_count  most bytes of tensors in one file.
  /// @throws UnsupportedError naming a tensor of a type that is not carried; BindingError naming a
  /// trained one that the checkpoint does not have so.
  TrainedModelFiles(Checkpoint checkpoint, const NamedTensors& trained,
                    std::uint64_t shard_byte_count = 5'000'000'000)
      : checkpoint_{std::move(checkpoint)},
        shards_{split_into_shards(checkpoint_, shard_byte_count)} {
    if (!checkpoint_.unsupported().empty()) {
      throw UnsupportedError{checkpoint_.folder().string() + ": tensor " +
                             checkpoint_.unsupported()[0].name + " has type " +
                             checkpoint_.unsupported()[0].dtype + ", which cannot be copied"};
    }
    for (const auto& [name, tensor] : trained) {
      const StoredTensor& stored = checkpoint_.at(name);
      if (stored.spec.shape != shape_of(tensor) || !is_computable(stored.spec.dtype)) {
        throw BindingError{place(stored) + " has another shape or type than what was trained"};
      }
      trained_.emplace(name, tensor);
    }
  }
  TrainedModelFiles(const TrainedModelFiles&) = delete;  // shards point into the checkpoint
  TrainedModelFiles& operator=(const TrainedModelFiles&) = delete;

  /// @brief Writes the files into `folder`, where other files may lie. All are written and made
  /// durable beside their places first: a full disk or any other failure of writing leaves what was
  /// there. A single file of weights is then replaced in one move. Where there are several, or
  /// other files change as well, a crash between the moves leaves no weights file that an index or
  /// model.safetensors names: a folder that loading refuses, never a mixture.
  /// @throws StorageError naming the path; Error naming a value that is not finite in its type.
  /// **Cost.** Memory: some MiB. On the disk the model twice for a moment.
  void save(const std::filesystem::path& folder) const {
    const detail::StagingFolder staging{folder, ".model-new"};
    const std::vector<std::string> changed = stage_other_files(folder, staging.path());
    for (const ShardOfTensors& shard : shards_) write(staging.path(), shard);
    if (shards_.size() > 1) atomic_replace(staging.path() / detail::index_file_name, index_text());
    const std::vector<std::string> names = weight_files();
    if (shards_.size() > 1 || !changed.empty() || holds_other_weights(folder, names))
      remove_weights(folder);
    for (const std::string& name : changed) detail::move_file(staging.path() / name, folder / name);
    for (const std::string& name : names) detail::move_file(staging.path() / name, folder / name);
  }

  /// @brief True if the folder holds what save() would write: the same bytes.
  [[nodiscard]] bool are_in(const std::filesystem::path& folder) const {
    try {
      for (const std::filesystem::path& path : detail::model_files(checkpoint_.folder())) {
        if (!detail::holds_text(folder / path.filename(), text_of(path))) return false;
      }
      if (shards_.size() > 1 && !detail::holds_text(folder / detail::index_file_name, index_text()))
        return false;
      return std::ranges::all_of(shards_,
                                 [&](const ShardOfTensors& shard) { return holds(folder, shard); });
    } catch (const StorageError&) {
      return false;
    } catch (const FormatError&) {
      return false;
    }
  }

 private:
  /// What of a tensor is in memory at once, as stored.
  static constexpr std::uint64_t piece_byte_count = std::uint64_t{2} << 20;
  using Piece = std::function<bool(std::span<const std::byte>)>;

  [[nodiscard]] std::string place(const StoredTensor& stored) const {
    return checkpoint_.files()[stored.file].string() + ": tensor " + stored.spec.name;
  }
  [[nodiscard]] std::string index_text() const { return shard_index_text(shards_); }
  [[nodiscard]] static std::string text_of(const std::filesystem::path& path) {
    return read_small_file(path, std::uint64_t{256} << 20);
  }
  /// In the order in which they come to their place: what makes the others a model is last.
  [[nodiscard]] std::vector<std::string> weight_files() const {
    std::vector<std::string> names;
    for (const ShardOfTensors& shard : shards_) names.push_back(shard.file_name);
    if (shards_.size() > 1) names.emplace_back(detail::index_file_name);
    return names;
  }

  /// @returns those that the folder does not hold like this.
  [[nodiscard]] std::vector<std::string> stage_other_files(const std::filesystem::path& folder,
                                                           const std::filesystem::path& to) const {
    std::vector<std::string> changed;
    for (const std::filesystem::path& path : detail::model_files(checkpoint_.folder())) {
      const std::string text = text_of(path), name = path.filename().string();
      if (detail::holds_text(folder / name, text)) continue;
      atomic_replace(to / name, text);
      changed.push_back(name);
    }
    return changed;
  }
  [[nodiscard]] static bool is_weights(const std::string& name) {
    return name == detail::index_file_name ||
           (name.starts_with("model") && name.ends_with(".safetensors"));
  }
  [[nodiscard]] static std::vector<std::string> weights_in(const std::filesystem::path& folder) {
    std::vector<std::string> names;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator{folder, error}) {
      const std::string name = entry.path().filename().string();
      if (is_weights(name)) names.push_back(name);
    }
    std::ranges::sort(names, std::greater{});  // the index, then model.safetensors
    std::stable_partition(names.begin(), names.end(),
                          [](const std::string& name) { return name == detail::index_file_name; });
    return names;
  }
  [[nodiscard]] static bool holds_other_weights(const std::filesystem::path& folder,
                                                const std::vector<std::string>& names) {
    return std::ranges::any_of(weights_in(folder), [&](const std::string& name) {
      return std::ranges::find(names, name) == names.end();
    });
  }
  static void remove_weights(const std::filesystem::path& folder) {
    for (const std::string& name : weights_in(folder)) {
      std::error_code error;
      std::filesystem::remove(folder / name, error);
      if (error) throw StorageError{(folder / name).string(), "cannot be replaced", error};
    }
  }

  void write(const std::filesystem::path& folder, const ShardOfTensors& shard) const {
    std::vector<TensorSpec> specs;
    for (const StoredTensor* tensor : shard.tensors) specs.push_back(tensor->spec);
    SafetensorsStream out{folder / shard.file_name, specs, {{"format", "pt"}}};
    for (const std::size_t i : out.order()) {
      (void)each_piece(*shard.tensors[i], [&](std::span<const std::byte> bytes) {
        out.append(bytes);
        return true;
      });
    }
    out.commit();
  }
  /// The same tensors with the same bytes; the header follows from them.
  [[nodiscard]] bool holds(const std::filesystem::path& folder, const ShardOfTensors& shard) const {
    const std::filesystem::path path = folder / shard.file_name;
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) return false;
    const Checkpoint there = Checkpoint::open(path);
    if (there.tensors().size() != shard.tensors.size()) return false;
    const File file = File::open(path);
    std::vector<std::byte> buffer;
    for (const StoredTensor* tensor : shard.tensors) {
      const StoredTensor* const other = there.find(tensor->spec.name);
      if (other == nullptr || other->spec.dtype != tensor->spec.dtype ||
          other->spec.shape != tensor->spec.shape) {
        return false;
      }
      std::uint64_t offset = other->range.offset;
      const bool same = each_piece(*tensor, [&](std::span<const std::byte> bytes) {
        buffer.resize(bytes.size());
        if (file.read_at(offset, buffer)) return false;
        offset += bytes.size();
        return std::ranges::equal(buffer, bytes);
      });
      if (!same) return false;
    }
    return true;
  }

  /// The bytes to be stored of one tensor. @returns false as soon as `piece` does.
  [[nodiscard]] bool each_piece(const StoredTensor& stored, const Piece& piece) const {
    const auto found = trained_.find(stored.spec.name);
    return found == trained_.end() ? each_stored_piece(stored, piece)
                                   : each_trained_piece(stored, found->second, piece);
  }
  [[nodiscard]] bool each_trained_piece(const StoredTensor& stored, const at::Tensor& trained,
                                        const Piece& piece) const {
    const c10::NoGradGuard no_grad;
    const at::Tensor flat = trained.detach().reshape({-1});
    const auto most =
        static_cast<std::int64_t>(piece_byte_count / byte_count_of(stored.spec.dtype));
    for (std::int64_t begin = 0; begin < flat.numel(); begin += most) {
      const at::Tensor some = flat.narrow(0, begin, std::min(most, flat.numel() - begin))
                                  .to(scalar_type_of(stored.spec.dtype))
                                  .to(at::kCPU)
                                  .contiguous();
      if (!at::isfinite(some).all().item<bool>()) {
        throw Error{"tensor " + stored.spec.name + ": a trained value is not finite in type " +
                    std::string{name_of(stored.spec.dtype)} + ", in which the model is stored"};
      }
      if (!piece(bytes_of(some))) return false;
    }
    return true;
  }
  [[nodiscard]] bool each_stored_piece(const StoredTensor& stored, const Piece& piece) const {
    const File file = File::open(checkpoint_.files()[stored.file]);
    std::vector<std::byte> buffer;
    for (std::uint64_t begin = 0; begin < stored.range.byte_count; begin += piece_byte_count) {
      buffer.resize(
          static_cast<std::size_t>(std::min(piece_byte_count, stored.range.byte_count - begin)));
      const std::uint64_t offset = stored.range.offset + begin;
      if (const std::error_code error = file.read_at(offset, buffer)) {
        throw StorageError{place(stored) + ", offset " + std::to_string(offset), "cannot be read",
                           error};
      }
      if (!piece(buffer)) return false;
    }
    return true;
  }

  Checkpoint checkpoint_;
  std::vector<ShardOfTensors> shards_;
  std::map<std::string, at::Tensor, std::less<>> trained_;
};

}  // namespace block_streamer::inline v1
