// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Context.h>

#include <cstdlib>

namespace block_streamer_benchmarks {

/// @brief Deterministic kernels from here to the end of the scope. cuBLAS needs a fixed workspace
/// for them; while the variable that says so is set, LibTorch parses it at every matrix product,
/// which costs 35 µs each: so never while something is timed.
class Deterministic {
 public:
  /// @param strict  false: kernels that are not deterministic warn instead of throwing, and
  ///        attention does without cuDNN.
  explicit Deterministic(bool strict) : cudnn_{at::globalContext().userEnabledCuDNNSDP()} {
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/1);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/!strict);
    if (!strict) at::globalContext().setSDPUseCuDNN(false);
  }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;
  ~Deterministic() {
    at::globalContext().setDeterministicAlgorithms(false, false);
    at::globalContext().setSDPUseCuDNN(cudnn_);
    ::unsetenv("CUBLAS_WORKSPACE_CONFIG");
  }

 private:
  bool cudnn_;
};

}  // namespace block_streamer_benchmarks
