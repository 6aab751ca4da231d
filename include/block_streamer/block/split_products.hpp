// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/gradient_node.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sub.h>

#include <cstdint>

namespace block_streamer::inline v1::detail {

/// Products of many bf16 rows with narrow fp32 factors, on the units that multiply bf16: a factor
/// is taken as the sum of two bf16 matrices, which have 16 bits of it together, and products are
/// summed in fp32. No copy of the rows in fp32 is made, and no product as wide as they are.

/// @brief Fewer rows are faster in fp32, as it takes fewer operations.
inline constexpr std::int64_t least_split_rows = 1024;

/// @brief True if rows and factor are multiplied so. rows: (N, n); factor: any.
[[nodiscard]] inline bool is_split(const at::Tensor& rows, const at::Tensor& factor) {
  return rows.is_cuda() && rows.scalar_type() == at::kBFloat16 &&
         factor.scalar_type() == at::kFloat && rows.size(0) >= least_split_rows;
}

/// A fp32 matrix as high + low.
struct SplitMatrix {
  at::Tensor high, low;  ///< bf16

  explicit SplitMatrix(const at::Tensor& matrix)
      : high{cast(matrix, at::kBFloat16)}, low{cast(at::sub(matrix, high), at::kBFloat16)} {}
};

/// @brief a·b in fp32, of bf16 matrices. Where LibTorch has no such product (on the host, in older
/// versions) the matrices are widened first.
template <class Tensor>
[[nodiscard]] at::Tensor wide_product(const Tensor& a, const Tensor& b) {
  if constexpr (requires { at::mm(a, b, at::kFloat); }) {
    if (a.is_cuda()) return at::mm(a, b, at::kFloat);
  }
  return at::mm(cast(a, at::kFloat), cast(b, at::kFloat));
}

/// @brief rows·factor in fp32. rows: (N, n), bf16; factor: (n, r), fp32; result: (N, r).
[[nodiscard]] inline at::Tensor times_factor(const at::Tensor& rows, const at::Tensor& factor) {
  const SplitMatrix split{factor};
  const at::Tensor parts = wide_product(rows, at::cat({split.high, split.low}, 1));  // (N, 2r)
  const std::int64_t rank = factor.size(1);
  return at::add(parts.narrow(1, 0, rank), parts.narrow(1, rank, rank));
}

/// @brief sum += scale·narrow·factor, rounded once. sum: (N, m), bf16; narrow: (N, r) and factor:
/// (r, m), fp32.
inline void add_times_factor(at::Tensor& sum, const at::Tensor& narrow, const at::Tensor& factor,
                             double scale) {
  const SplitMatrix left{narrow}, right{factor};
  sum.addmm_(at::cat({left.high, left.low, left.high}, 1),
             at::cat({right.high, right.high, right.low}, 0), /*beta=*/1, scale);
}

/// @brief narrowᵀ·rows in fp32. narrow: (N, r), fp32; rows: (N, m), bf16; result: (r, m).
[[nodiscard]] inline at::Tensor narrow_times_rows(const at::Tensor& narrow,
                                                  const at::Tensor& rows) {
  const SplitMatrix split{narrow};
  const at::Tensor parts =
      wide_product(transposed(at::cat({split.high, split.low}, 1)), rows);  // (2r, m)
  const std::int64_t rank = narrow.size(1);
  return at::add(parts.narrow(0, 0, rank), parts.narrow(0, rank, rank));
}

}  // namespace block_streamer::inline v1::detail
