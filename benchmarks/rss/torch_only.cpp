// SPDX-License-Identifier: Apache-2.0
// Loads LibTorch and ends: what any program pays for LibTorch alone.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

int main() {
  return at::zeros({1}).numel() == 1 ? 0 : 1;
}
