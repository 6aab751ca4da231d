// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/block_image.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/core/io_completion.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <system_error>

namespace block_streamer::inline v1 {

/// @brief The precondition of storage_tier's `async_read`, checked: an error instead of memory that
/// somebody else owns. Empty if the read may go ahead, invalid_argument otherwise.
template <class Source>
[[nodiscard]] std::error_code check_read(const Source& source, BlockId block, ByteRange range,
                                         std::span<const std::byte> out) noexcept {
  const std::error_code invalid = std::make_error_code(std::errc::invalid_argument);
  if (index_of(block) >= source.block_count() || out.size() != range.byte_count) return invalid;
  const BlockImage& image = source.image(block);
  if (range.offset > image.byte_count || range.byte_count > image.byte_count - range.offset) {
    return invalid;
  }
  const std::uint32_t granularity = image.read_granularity;
  if (granularity <= 1) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(out.data());
  const bool aligned = range.offset % granularity == 0 && range.byte_count % granularity == 0 &&
                       address % granularity == 0;
  return aligned ? std::error_code{} : invalid;
}

/// @brief async_read of a tier whose bytes are in memory: copies, and completes at once.
template <class Source>
void read_from_memory(const Source& source, BlockId block, ByteRange range,
                      std::span<std::byte> out, IoCompletion done) noexcept {
  const std::error_code error = check_read(source, block, range, out);
  if (!error && !out.empty()) {
    std::memcpy(out.data(), source.bytes(block).data() + range.offset, out.size());
  }
  done(error, error ? 0 : out.size());
}

}  // namespace block_streamer::inline v1
