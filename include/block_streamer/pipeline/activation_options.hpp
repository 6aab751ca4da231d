// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>
#include <block_streamer/core/expects.hpp>

#include <cstdint>
#include <filesystem>

namespace block_streamer::inline v1 {

/// Where the inputs of blocks wait between a forward and its backward.
enum class ActivationPlace : std::uint8_t {
  device,  ///< where they are
  ram,     ///< page-locked host memory; the same as device where that is host memory
  file,    ///< a file, which wears the drive: nothing chooses it by itself
};

struct ActivationOptions {
  ActivationPlace place = ActivationPlace::device;
  /// Of the file: an existing folder. The file has no name there, and is gone with the streamer and
  /// its graphs.
  std::filesystem::path folder{};
};

/// @throws ContractViolation if a folder is given without a file to be in it, or none with one.
inline void check(const ActivationOptions& options) {
  expects(options.folder.empty() == (options.place != ActivationPlace::file),
          "a folder is named for activations in a file, and only for them");
}

}  // namespace block_streamer::inline v1
