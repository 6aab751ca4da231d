// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <cstddef>
#include <functional>
#include <span>

namespace block_streamer::inline v1::detail {

/// @throws ContractViolation if the sides of a copy differ in size or share a byte.
inline void expects_copyable(std::span<const std::byte> to, std::span<const std::byte> from,
                             CallSite where = CallSite::current()) {
  expects(to.size() == from.size(), "a copy has one size", where);
  const std::less_equal<> before;
  expects(to.empty() || before(from.data() + from.size(), to.data()) ||
              before(to.data() + to.size(), from.data()),
          "the ranges of a copy overlap", where);
}

}  // namespace block_streamer::inline v1::detail
