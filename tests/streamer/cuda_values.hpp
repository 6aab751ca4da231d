// SPDX-License-Identifier: Apache-2.0
// What tests on a CUDA device feed and compare.
#pragma once

#include "toy_model.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include <support/catch.hpp>
#include <support/cuda.hpp>

#include <string>

namespace support {

inline bool same(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return same_bits(a.cpu(), b.cpu());
}

inline at::Tensor input_of(std::int64_t rows, std::int64_t seed,
                           at::ScalarType dtype = at::kFloat) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return at::randn({rows, toy_width}, generator).to(dtype).to(cuda);
}

/// What is thrown says this.
template <class Error, class Work>
void check_refused(Work&& work, const std::string& part) {
  try {
    work();
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(std::string{error.what()}.find(part) != std::string::npos);
  }
}

}  // namespace support
