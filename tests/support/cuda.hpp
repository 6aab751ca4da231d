// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/cuda_backend.hpp>

#include <ATen/Context.h>
#include <c10/core/Device.h>

#include <support/catch.hpp>

namespace support {

inline const at::Device cuda{at::kCUDA, 0};

/// Whether there is a device; says why not. Its kernels repeat themselves from now on.
inline bool cuda_usable() {
  const auto why = block_streamer::CudaBackend::why_unusable();
  if (why) WARN("skipped: " << *why);
  at::globalContext().setDeterministicAlgorithms(true, false);
  return !why;
}

}  // namespace support
