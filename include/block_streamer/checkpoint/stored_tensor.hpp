// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/tensor_spec.hpp>

#include <cstdint>
#include <string>

namespace block_streamer::inline v1 {

/// A tensor as a file holds it: what it is and where its bytes lie. No alignment is promised.
struct StoredTensor {
  TensorSpec spec;         ///< with its full name
  std::uint32_t file = 0;  ///< index into the checkpoint's files
  ByteRange range;         ///< absolute in that file
};

/// A stored tensor of a type that this library does not carry (unknown, or narrower than a byte).
/// Its bytes are accounted for; using it is refused.
struct UnsupportedTensor {
  std::string name;
  std::string dtype;  ///< as the file spells it
  std::uint32_t file = 0;
  ByteRange range;
  Shape shape;
};

}  // namespace block_streamer::inline v1
