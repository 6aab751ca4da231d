// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

std::size_t bytes_in_other_unit();
std::size_t bytes_with_torch();
bool cuda_runtime_answers();
bool torch_knows_cuda();
