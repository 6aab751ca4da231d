// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/pipeline/fetch_machine.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace block_streamer::inline v1 {

/// What ended: the read of a ticket, or the copies out of its chunk.
enum class FetchEvent : std::uint8_t { arrived, drained };

/// @brief What reads and copies reported, in that order, until the machine is told.
/// **Threads.** Externally synchronised: the mutex of the machine.
/// **Cost.** No allocation: a ticket has at most two events on their way.
class FetchInbox {
 public:
  explicit FetchInbox(std::uint32_t ticket_count) {
    messages_.reserve(2 * std::size_t{ticket_count});
  }

  void push(FetchEvent event, std::uint32_t ticket) { messages_.push_back({event, ticket}); }
  [[nodiscard]] bool empty() const noexcept { return messages_.empty(); }

  /// @brief Tells the machine everything.
  /// @throws ContractViolation for a message that the machine refuses; it is gone, those after it
  /// stay.
  template <class Rules>
  void deliver_to(FetchMachine<Rules>& machine) {
    std::size_t taken = 0;
    try {
      while (taken < messages_.size()) deliver(messages_[taken++], machine);
    } catch (...) {  // one that the machine refuses does not take the others with it
      messages_.erase(messages_.begin(), messages_.begin() + static_cast<std::ptrdiff_t>(taken));
      throw;
    }
    messages_.clear();
  }

 private:
  struct Message {
    FetchEvent event;
    std::uint32_t ticket;
  };
  template <class Rules>
  static void deliver(const Message& message, FetchMachine<Rules>& machine) {
    message.event == FetchEvent::arrived ? machine.arrived(message.ticket)
                                         : machine.drained(message.ticket);
  }

  std::vector<Message> messages_;
};

}  // namespace block_streamer::inline v1
