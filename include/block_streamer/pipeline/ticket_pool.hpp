// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace block_streamer::inline v1 {

/// A place for one chunk in flight: a staging chunk, or a place in the count of reads.
struct Ticket {
  enum class State : std::uint8_t { free, reading, arrived, draining };
  State state = State::free;
  std::uint64_t fetch = 0;
  std::uint32_t chunk = 0;
};

/// @brief The tickets, and those granted but not yet copied, in plan order.
class TicketPool {
 public:
  explicit TicketPool(std::uint32_t count) : tickets_(count), window_(count) {
    free_.reserve(count);
    for (std::uint32_t i = count; i > 0; --i) free_.push_back(i - 1);
  }

  [[nodiscard]] bool any_free() const noexcept { return !free_.empty(); }
  /// @brief True if nothing is in flight.
  [[nodiscard]] bool all_free() const noexcept { return free_.size() == tickets_.size(); }
  [[nodiscard]] Ticket& operator[](std::uint32_t ticket) noexcept { return tickets_[ticket]; }

  std::uint32_t grant(std::uint64_t fetch, std::uint32_t chunk) {
    const std::uint32_t ticket = free_.back();
    free_.pop_back();
    tickets_[ticket] = {Ticket::State::reading, fetch, chunk};
    window_[(head_ + length_++) % window_.size()] = ticket;
    return ticket;
  }
  void release(std::uint32_t ticket) {
    tickets_[ticket].state = Ticket::State::free;
    free_.push_back(ticket);
  }

  [[nodiscard]] std::uint32_t window_length() const noexcept { return length_; }
  /// @brief The index-th ticket that waits for its copy, in plan order.
  [[nodiscard]] std::uint32_t waiting(std::uint32_t index) const noexcept {
    return window_[(head_ + index) % window_.size()];
  }
  /// @brief Takes the index-th out of the window; those before it keep their order.
  void take(std::uint32_t index) noexcept {
    for (std::uint32_t i = index; i > 0; --i) {
      window_[(head_ + i) % window_.size()] = window_[(head_ + i - 1) % window_.size()];
    }
    head_ = (head_ + 1) % static_cast<std::uint32_t>(window_.size());
    --length_;
  }

 private:
  std::vector<Ticket> tickets_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> window_;  ///< ring
  std::uint32_t head_ = 0;
  std::uint32_t length_ = 0;
};

}  // namespace block_streamer::inline v1
