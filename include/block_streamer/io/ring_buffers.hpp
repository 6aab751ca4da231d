// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/io/ring_read.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief The memory that a ring has pinned, by address. Pinning may fail at any piece: what is not
/// pinned is read plainly. **Threads.** The ring's.
template <read_ring Ring>
class RingBuffers {
 public:
  /// @brief Pins all of `memory`, or none of it.
  /// @returns why not; empty if it is pinned.
  [[nodiscard]] std::string add(Ring& ring, std::span<std::byte> memory) {
    const std::span<std::byte> whole = memory;
    while (!memory.empty()) {
      const auto piece = memory.first(std::min(memory.size(), largest_piece));
      const std::uint32_t index = free_index();
      if (const std::error_code error = ring.add_buffer(index, piece)) {
        remove(ring, whole);
        return "memory for reads cannot be pinned: " + error.message() +
               (error == std::errc::not_enough_memory ? " (raise the limit, ulimit -l)" : "");
      }
      pieces_.push_back({index, piece});
      memory = memory.subspan(piece.size());
    }
    return {};
  }
  /// @brief Lets go of what lies in `memory`. @pre no read into it is in flight.
  void remove(Ring& ring, std::span<const std::byte> memory) {
    std::erase_if(pieces_, [&](const Piece& piece) {
      if (!holds(memory, piece.memory)) return false;
      ring.remove_buffer(piece.index);
      return true;
    });
  }
  [[nodiscard]] std::optional<std::uint32_t> find(std::span<const std::byte> out) const noexcept {
    for (const Piece& piece : pieces_) {
      if (holds(piece.memory, out)) return piece.index;
    }
    return std::nullopt;
  }
  [[nodiscard]] std::uint64_t byte_count() const noexcept {
    std::uint64_t sum = 0;
    for (const Piece& piece : pieces_) sum += piece.memory.size();
    return sum;
  }

 private:
  struct Piece {
    std::uint32_t index;
    std::span<std::byte> memory;
  };
  static constexpr std::size_t largest_piece = std::size_t{1} << 30;  // the system's limit

  static bool holds(std::span<const std::byte> outer, std::span<const std::byte> inner) noexcept {
    const std::less_equal<const std::byte*> not_after;
    return not_after(outer.data(), inner.data()) &&
           not_after(inner.data() + inner.size(), outer.data() + outer.size());
  }
  [[nodiscard]] std::uint32_t free_index() const noexcept {
    for (std::uint32_t index = 0;; ++index) {
      if (std::ranges::none_of(pieces_, [index](const Piece& p) { return p.index == index; })) {
        return index;
      }
    }
  }

  std::vector<Piece> pieces_;
};

}  // namespace block_streamer::inline v1
