// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/dtype.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/tensor_spec.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7
/// LibTorch before 2.7 has no such type; its bytes are only ever passed on.
inline constexpr at::ScalarType exponent_type = at::ScalarType::Byte;
#else
inline constexpr at::ScalarType exponent_type = at::ScalarType::Float8_e8m0fnu;
#endif

/// In the order of DType.
inline constexpr std::array<at::ScalarType, 16> scalar_types{
    at::ScalarType::Bool,          at::ScalarType::Byte,        at::ScalarType::Char,
    at::ScalarType::Float8_e4m3fn, at::ScalarType::Float8_e5m2, exponent_type,
    at::ScalarType::Short,         at::ScalarType::UInt16,      at::ScalarType::Half,
    at::ScalarType::BFloat16,      at::ScalarType::Int,         at::ScalarType::UInt32,
    at::ScalarType::Float,         at::ScalarType::Long,        at::ScalarType::UInt64,
    at::ScalarType::Double};
}  // namespace detail

/// @brief LibTorch's name of a stored element type.
[[nodiscard]] constexpr at::ScalarType scalar_type_of(DType dtype) noexcept {
  return detail::scalar_types[static_cast<std::size_t>(dtype)];
}

/// @brief The stored element type of a tensor.
/// @throws UnsupportedError if no file of ours carries it (complex, quantized, sub-byte types).
[[nodiscard]] inline DType dtype_of(at::ScalarType type) {
  for (std::size_t i = 0; i < detail::scalar_types.size(); ++i) {
    if (detail::scalar_types[i] == type) return static_cast<DType>(i);
  }
  throw UnsupportedError{std::string{"tensors of type "} + c10::toString(type) +
                         " cannot be stored or streamed"};
}

/// @brief True for the types that linear maps and norms compute in: f16, bf16, f32, f64. The 8-bit
/// floats are packed data, never converted or multiplied as they are.
[[nodiscard]] constexpr bool is_computable(DType dtype) noexcept {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
}

/// @brief LibTorch's form of a shape. @throws ContractViolation if a size exceeds 63 bits.
[[nodiscard]] inline std::vector<std::int64_t> sizes_of(const Shape& shape) {
  std::vector<std::int64_t> sizes;
  sizes.reserve(shape.size());
  for (const std::uint64_t size : shape) {
    expects(size <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()),
            "a dimension fits a signed 64-bit integer");
    sizes.push_back(static_cast<std::int64_t>(size));
  }
  return sizes;
}

/// @brief The shape of a tensor.
[[nodiscard]] inline Shape shape_of(const at::Tensor& tensor) {
  return {tensor.sizes().begin(), tensor.sizes().end()};
}

/// @brief A dense tensor over memory that somebody else owns; no byte moves.
/// Never an inference tensor, whatever mode the caller is in, so it may enter a graph and has a
/// version counter. One counter per tensor: two views share none.
/// @param bytes  exactly the tensor's bytes, on `device`; any alignment that its kernels accept.
/// @pre bytes.size() equals the dense size of `spec`.
/// **Lifetime.** The memory outlives the tensor and everything that shares its storage.
/// **Cost.** A few allocations on the host: not for the path of a visit, see ViewCache.
[[nodiscard]] inline at::Tensor view_of(std::span<std::byte> bytes, const TensorSpec& spec,
                                        at::Device device) {
  const auto byte_count = dense_byte_count(spec.dtype, spec.shape);
  expects(byte_count.has_value() && *byte_count == bytes.size(),
          "the memory of tensor " + spec.name + " has the size of its shape and type");
  const c10::InferenceMode normal_mode{false};
  return at::for_blob(bytes.data(), sizes_of(spec.shape))
      .options(at::TensorOptions{}.dtype(scalar_type_of(spec.dtype)).device(device))
      .target_device(device)
      .make_tensor();
}

/// @brief The bytes of a dense tensor. @pre contiguous.
[[nodiscard]] inline std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  expects(tensor.is_contiguous(), "the tensor is contiguous");
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace block_streamer::inline v1
