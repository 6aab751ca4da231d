// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace block_streamer::inline v1 {

namespace detail {

/// Reads `stored` piece by piece through `staging` into the flat tensor `to`, converting.
inline void load_pieces(const Checkpoint& checkpoint, const StoredTensor& stored,
                        const at::Tensor& staging, const at::Tensor& to) {
  const std::filesystem::path& path = checkpoint.files()[stored.file];
  const File file = File::open(path);
  const auto item = static_cast<std::int64_t>(byte_count_of(stored.spec.dtype));
  for (std::int64_t begin = 0; begin < to.numel(); begin += staging.numel()) {
    const std::int64_t count = std::min(staging.numel(), to.numel() - begin);
    const at::Tensor piece = staging.narrow(0, 0, count);
    const std::uint64_t offset = stored.range.offset + static_cast<std::uint64_t>(begin * item);
    if (const std::error_code error = file.read_at(offset, bytes_of(piece))) {
      throw StorageError{
          path.string() + ", offset " + std::to_string(offset) + ", tensor " + stored.spec.name,
          "cannot read the tensor", error};
    }
    to.narrow(0, begin, count).copy_(piece);
  }
}

}  // namespace detail

/// @brief Reads one tensor of a checkpoint into memory of its own: for what stays resident.
/// @param dtype  what floating tensors are converted to; others, and 8-bit floats, keep their type.
/// @returns a normal, contiguous tensor, also when called in inference mode.
/// @throws BindingError, UnsupportedError as Checkpoint::at(); StorageError naming file, offset and
/// tensor if it cannot be read.
/// **Cost.** Memory: the result plus 4 MiB, whatever is converted.
[[nodiscard]] inline at::Tensor load_tensor(const Checkpoint& checkpoint, std::string_view name,
                                            std::optional<DType> dtype = {},
                                            at::Device device = at::kCPU) {
  constexpr std::int64_t piece_byte_count = std::int64_t{4} << 20;
  const StoredTensor& stored = checkpoint.at(name);
  const bool convert = dtype && is_computable(stored.spec.dtype);
  const c10::InferenceMode normal_mode{false};
  const c10::NoGradGuard no_grad;
  const auto options = at::TensorOptions{}.device(device);
  at::Tensor result =
      at::empty(sizes_of(stored.spec.shape),
                options.dtype(scalar_type_of(convert ? *dtype : stored.spec.dtype)));
  if (result.numel() == 0) return result;
  const auto item = static_cast<std::int64_t>(byte_count_of(stored.spec.dtype));
  const at::Tensor staging =
      at::empty({std::min(result.numel(), piece_byte_count / item)},
                at::TensorOptions{}.dtype(scalar_type_of(stored.spec.dtype)));
  detail::load_pieces(checkpoint, stored, staging, result.view({-1}));
  return result;
}

}  // namespace block_streamer::inline v1
