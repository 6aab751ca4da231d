// SPDX-License-Identifier: Apache-2.0
// What callers may do with a pipeline, at random, and whether it stays within its slots.
#pragma once

#include <block_streamer/plan/visit_order.hpp>
#include <block_streamer/trace/residency_observer.hpp>

#include <cstddef>
#include <cstdint>
#include <random>

namespace support {
namespace bs = block_streamer;

struct Bound {
  std::uint64_t slots = 0, resident = 0, broken = 0;
  void observe(const bs::Transition& t) noexcept {
    resident += t.from == bs::Residency::empty;
    resident -= t.to == bs::Residency::empty;
    broken += resident > slots;
  }
};

/// What a caller may do, at random.
struct Whim {
  bs::VisitOrder order, hint;
  std::size_t stop_at;
  bool throws;
};
inline Whim whim_of(std::mt19937& random, std::size_t blocks) {
  const auto some_order = [&] {
    return random() % 2 == 0 ? bs::ascending(random() % 3, blocks)
                             : bs::descending(random() % 3, blocks);
  };
  return {some_order(), some_order(), random() % 3 == 0 ? random() % blocks : blocks,
          random() % 5 == 0};
}

}  // namespace support
