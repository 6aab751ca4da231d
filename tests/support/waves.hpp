// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <c10/util/accumulate.h>

namespace support {

/// Values that differ everywhere, of size about 1, the same on every machine.
[[nodiscard]] inline at::Tensor waves(at::IntArrayRef sizes, double seed,
                                      at::ScalarType dtype = at::kDouble) {
  const at::Tensor i = at::arange(c10::multiply_integers(sizes), at::kDouble);
  return ((i * (1.7 + seed)).sin() + (i * i * 0.013 + seed).cos()).to(dtype).view(sizes);
}

/// The largest difference of two elements.
[[nodiscard]] inline double largest(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

}  // namespace support
