// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/checkpoint.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace block_streamer_cli {

/// A tensor that holds values that are no finite numbers.
struct NonFiniteTensor {
  std::string name;
  std::string file;
  std::uint64_t count = 0;         ///< of such elements
  std::uint64_t first_offset = 0;  ///< of the first one, in the file
};

/// What a scan found.
struct WeightCheck {
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;
  std::vector<NonFiniteTensor> non_finite;
};

/// @brief Reads the named tensors through 4 MiB of memory and looks for infinities and NaNs.
/// @throws StorageError naming file, offset and tensor if one cannot be read.
[[nodiscard]] WeightCheck verify_weights(const block_streamer::Checkpoint& checkpoint,
                                         const std::vector<std::string>& names);

}  // namespace block_streamer_cli
