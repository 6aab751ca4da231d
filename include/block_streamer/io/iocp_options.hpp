// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <cstdint>

namespace block_streamer::inline v1 {

/// How a completion port reads. The defaults are those of the io_uring tier; they were not measured
/// on Windows.
struct IocpOptions {
  /// Requests in the system at once; what comes beyond waits in order.
  std::uint32_t queue_depth = 16;
  /// A read is cut into requests of at most this many bytes, which run side by side.
  std::uint32_t request_byte_count = std::uint32_t{4} << 20;
};

/// @throws ContractViolation naming the option that is out of range.
inline void check(const IocpOptions& options) {
  expects(options.queue_depth >= 1 && options.queue_depth <= 4096, "queue_depth is from 1 to 4096");
  expects(options.request_byte_count >= 65'536 && options.request_byte_count <= (1U << 30) &&
              options.request_byte_count % 65'536 == 0,
          "request_byte_count is a multiple of 64 KiB, from 64 KiB to 1 GiB");
}

}  // namespace block_streamer::inline v1
