// SPDX-License-Identifier: Apache-2.0
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAStream.h>

#include "common.hpp"

// True with a driver or without: LibTorch's CUDA library is loaded and has registered itself.
bool torch_knows_cuda() {
  return at::hasCUDA() == (at::cuda::getNumGPUs() > 0) && at::globalContext().versionCUDART() > 0;
}
