// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <cstdint>
#include <string>

namespace block_streamer::inline v1 {

/// How a ring reads.
struct UringOptions {
  /// Requests in the ring at once; what comes beyond waits in order.
  std::uint32_t queue_depth = 16;
  /// A read is cut into requests of at most this many bytes. Large ones cost less time of the
  /// processor, small ones arrive sooner.
  std::uint32_t request_byte_count = std::uint32_t{4} << 20;
  /// Pin the memory that a pipeline announces once, instead of at every read; where the limits
  /// (RLIMIT_MEMLOCK) forbid it, plain reads take over.
  bool fixed_buffers = true;
};

/// @throws ContractViolation naming the option that is out of range.
inline void check(const UringOptions& options) {
  expects(options.queue_depth >= 1 && options.queue_depth <= 4096, "queue_depth is from 1 to 4096");
  expects(options.request_byte_count >= 4096 && options.request_byte_count <= (1U << 30),
          "request_byte_count is from 4 KiB to 1 GiB");
}

/// What became of a ring, in words for people.
struct UringReport {
  bool running = false;
  std::string refusal;  ///< why there is no ring and what would help; empty if there is one
  std::string setup;    ///< the flags that the system took
  std::string fixed_buffers_refusal;   ///< why reads are plain; empty while nothing was refused
  std::uint64_t fixed_byte_count = 0;  ///< announced memory that is pinned now
};

}  // namespace block_streamer::inline v1
