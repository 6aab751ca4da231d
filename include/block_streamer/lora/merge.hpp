// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/copied_files.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/checkpoint/shard_split.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/os/atomic_replace.hpp>
#include <block_streamer/os/file.hpp>
#include <block_streamer/os/folder_in_the_making.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

struct MergeOptions {
  std::uint64_t shard_byte_count = 5'000'000'000;  ///< most bytes of tensors in one file
  /// Called with the bytes written so far and all of them; may throw to end the merge.
  std::function<void(std::uint64_t, std::uint64_t)> progress{};
};

struct MergeReport {
  std::size_t merged = 0;  ///< tensors that the adapter changed
  std::size_t kept = 0;    ///< copied byte for byte
  std::size_t files = 0;   ///< of weights
  std::uint64_t byte_count = 0;
};

namespace detail {

/// Reads a checkpoint's tensors in pieces, adds the adapter's share, writes them on.
class AdapterMerge {
 public:
  AdapterMerge(const Checkpoint& checkpoint, const LoraAdapter& adapter,
               const MergeOptions& options)
      : checkpoint_{checkpoint}, options_{options}, rslora_{adapter.options().use_rslora} {
    for (const StoredTensor& tensor : checkpoint.tensors()) total_ += tensor.range.byte_count;
    for (const LoraModule& module : adapter.modules()) {
      const StoredTensor& stored = checkpoint.at(module.site.module + ".weight");
      expect_mergeable(stored, module);
      modules_.emplace(stored.spec.name, &module);
    }
    if (!checkpoint.unsupported().empty()) {
      throw UnsupportedError{checkpoint.folder().string() + ": tensor " +
                             checkpoint.unsupported()[0].name + " has type " +
                             checkpoint.unsupported()[0].dtype + ", which cannot be copied"};
    }
  }

  void write(const std::filesystem::path& folder, const ShardOfTensors& shard) {
    std::vector<TensorSpec> specs;
    for (const StoredTensor* tensor : shard.tensors) specs.push_back(tensor->spec);
    SafetensorsStream out{folder / shard.file_name, specs, {{"format", "pt"}}};
    for (const std::size_t i : out.order()) {
      const auto found = modules_.find(shard.tensors[i]->spec.name);
      copy(*shard.tensors[i], found == modules_.end() ? nullptr : found->second, out);
    }
    out.commit();
    ++report_.files;
  }
  [[nodiscard]] const MergeReport& report() const noexcept { return report_; }

 private:
  /// Rows of a tensor that are in memory at once: at most so many bytes, as stored.
  static constexpr std::uint64_t piece_byte_count = std::uint64_t{2} << 20;

  [[nodiscard]] std::string place(const StoredTensor& stored) const {
    return checkpoint_.files()[stored.file].string() + ": tensor " + stored.spec.name;
  }
  void expect_mergeable(const StoredTensor& stored, const LoraModule& module) const {
    if (!is_computable(stored.spec.dtype))
      throw UnsupportedError{place(stored) + " has type " +
                             std::string{name_of(stored.spec.dtype)} +
                             "; an adapter is merged into plain floats only"};
    if (stored.spec.shape != Shape{module.site.out, module.site.in})
      throw BindingError{place(stored) + " has shape " + to_string(stored.spec.shape) +
                         ", the adapter is for " + to_string({module.site.out, module.site.in})};
  }

  void copy(const StoredTensor& stored, const LoraModule* module, SafetensorsStream& out) {
    const File file = File::open(checkpoint_.files()[stored.file]);
    const std::uint64_t row =
        module == nullptr ? 1 : module->site.in * byte_count_of(stored.spec.dtype);
    const std::uint64_t piece = std::max(row, round_down(piece_byte_count, row));
    for (std::uint64_t begin = 0; begin < stored.range.byte_count; begin += piece) {
      const std::uint64_t size = std::min(piece, stored.range.byte_count - begin);
      buffer_.resize(size);
      const std::uint64_t offset = stored.range.offset + begin;
      if (const std::error_code error = file.read_at(offset, buffer_)) {
        throw StorageError{place(stored) + ", offset " + std::to_string(offset), "cannot be read",
                           error};
      }
      if (module != nullptr) add_rows(stored, *module, begin / row, size / row);
      out.append(buffer_);
      report_.byte_count += size;
      if (options_.progress) options_.progress(report_.byte_count, total_);
    }
    ++(module == nullptr ? report_.kept : report_.merged);
  }

  /// The buffer's rows plus the adapter's, in fp32 or wider, rounded once.
  void add_rows(const StoredTensor& stored, const LoraModule& module, std::uint64_t first,
                std::uint64_t count) {
    const c10::NoGradGuard no_grad;
    const at::Tensor rows =
        view_of(buffer_, {stored.spec.name, stored.spec.dtype, {count, module.site.in}}, at::kCPU);
    const auto type = stored.spec.dtype == DType::f64 ? at::kDouble : at::kFloat;
    const double scale = lora_scale(module.alpha, module.rank, rslora_);
    const at::Tensor b =
        module.b.narrow(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(count));
    const at::Tensor sum =
        at::addmm(rows.to(type), b.to(at::kCPU, type), module.a.to(at::kCPU, type), 1, scale);
    rows.copy_(sum);
    if (at::isfinite(rows).all().item<bool>()) return;
    throw Error{place(stored) + ", rows " + std::to_string(first) + " … " +
                std::to_string(first + count - 1) +
                ": the sum with the adapter is not finite in type " +
                std::string{name_of(stored.spec.dtype)}};
  }

  const Checkpoint& checkpoint_;
  const MergeOptions& options_;
  bool rslora_;
  std::map<std::string, const LoraModule*, std::less<>> modules_;  ///< by the tensor's name
  std::vector<std::byte> buffer_;
  std::uint64_t total_ = 0;
  MergeReport report_;
};

}  // namespace detail

/// @brief Writes the model with the adapter added to its weights, W + scale·B·A, as a Hugging Face
/// folder: safetensors files, their index if there are several, and the model's other files. Names,
/// types, shapes stay; tensors without an adapter keep their bytes. The same input gives the same
/// bytes with the same number of threads.
/// The sum is taken in fp32 (fp64 for such weights) and rounded once to the weight's type, as
/// peft's merge_and_unload() does; its safe_merge rounds B·A to that type before it adds. The
/// folder appears whole or not at all: everything is written beside its place first. A link to an
/// empty folder is followed.
/// @throws Error if something is there that is no empty folder, another process merges into it, or
/// a sum is not finite; UnsupportedError, BindingError naming a tensor that cannot be merged;
/// StorageError if reading or writing fails.
/// **Cost.** Reads and writes every tensor once; memory: the adapter, 2 MiB (at least a row) of a
/// tensor as stored and some copies of it in fp32.
inline MergeReport merge_adapter(const Checkpoint& checkpoint, const LoraAdapter& adapter,
                                 const std::filesystem::path& output,
                                 const MergeOptions& options = {}) {
  detail::AdapterMerge merge{checkpoint, adapter, options};
  const std::vector<ShardOfTensors> shards =
      split_into_shards(checkpoint, options.shard_byte_count);
  FolderInTheMaking folder{output, ".merging"};
  (void)detail::copy_model_files(checkpoint.folder(), folder.path(), {});
  for (const ShardOfTensors& shard : shards) merge.write(folder.path(), shard);
  if (shards.size() > 1) {
    atomic_replace(folder.path() / "model.safetensors.index.json",
                   std::string_view{shard_index_text(shards)});
  }
  folder.commit();
  return merge.report();
}

}  // namespace block_streamer::inline v1
