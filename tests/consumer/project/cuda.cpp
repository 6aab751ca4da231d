// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "common.hpp"

// Needs the runtime, not a driver.
bool cuda_runtime_answers() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess && version / 1000 == CUDART_VERSION / 1000;
}
