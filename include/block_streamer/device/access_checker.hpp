// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/access_history.hpp>
#include <block_streamer/device/happens_before.hpp>
#include <block_streamer/device/violation_log.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::detail {

/// @brief What the copies of one CheckedBackend and its objects share: who is ordered after whom,
/// who touched what, and what was wrong.
/// **Threads.** One mutex. Enqueueing takes a Session and calls the checked backend inside it, so
/// that the relation here and the order there are the same; nothing that waits or calls back is
/// called inside. What a session finds is reported after it has unlocked.
class AccessChecker {
 public:
  class Session;

  explicit AccessChecker(ViolationLog log) : log_{std::move(log)} {}
  [[nodiscard]] const ViolationLog& log() const noexcept { return log_; }

 private:
  std::mutex mutex_;
  HappensBefore order_;
  AccessHistory history_;
  std::map<std::thread::id, ActorId> threads_;
  std::map<const void*, VectorClock> tags_;
  std::vector<AddressRange> registered_;
  std::size_t stream_count_ = 0;
  ViolationLog log_;
};

[[nodiscard]] inline AddressRange address_range(std::span<const std::byte> bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  return {begin, begin + bytes.size()};
}

/// One locked step.
class AccessChecker::Session {
 public:
  explicit Session(AccessChecker& checker) : checker_{checker}, lock_{checker.mutex_} {}
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    lock_.unlock();
    for (const Violation& violation : found_) checker_.log_.add(violation);
  }

  [[nodiscard]] HappensBefore& order() noexcept { return checker_.order_; }

  ActorId add_stream() {
    return order().add_actor("stream " + std::to_string(checker_.stream_count_++));
  }

  /// The calling thread. One that was never seen comes after nobody.
  ActorId this_thread() {
    const auto id = std::this_thread::get_id();
    const auto known = checker_.threads_.find(id);
    if (known != checker_.threads_.end()) return known->second;
    const ActorId actor =
        order().add_actor("host thread " + std::to_string(checker_.threads_.size()));
    checker_.threads_.emplace(id, actor);
    return actor;
  }

  /// An operation starts after the call that enqueued it.
  void enqueue_on(ActorId stream) { order().edge(this_thread(), stream); }

  void access(ActorId actor, std::span<const std::byte> bytes, Access kind,
              std::string_view operation) {
    const AccessStamp stamp{actor, order().time(actor), operation};
    for (const Race& race :
         checker_.history_.access(stamp, order().clock(actor), address_range(bytes), kind)) {
      found_.push_back({ViolationKind::unordered_access, race.range,
                        party(race.earlier.actor, race.earlier.operation),
                        party(actor, operation)});
    }
  }
  void forget(std::span<const std::byte> bytes) { checker_.history_.forget(address_range(bytes)); }

  void add_registration(std::span<const std::byte> bytes) {
    checker_.registered_.push_back(address_range(bytes));
  }
  void drop_registration(std::span<const std::byte> bytes) {
    const AddressRange range = address_range(bytes);
    auto& all = checker_.registered_;
    const auto found = std::find_if(all.begin(), all.end(), [&](const AddressRange& r) {
      return r.begin == range.begin && r.end == range.end;
    });
    if (found != all.end()) all.erase(found);
  }
  void require_registered(ActorId actor, std::span<const std::byte> bytes,
                          std::string_view operation) {
    const AddressRange range = address_range(bytes);
    const auto& all = checker_.registered_;
    if (std::any_of(all.begin(), all.end(), [&](const auto& r) { return r.contains(range); })) {
      return;
    }
    found_.push_back({ViolationKind::unregistered_host_memory, range, {}, party(actor, operation)});
  }
  void report_never_recorded(ActorId actor, std::string_view operation) {
    found_.push_back({ViolationKind::event_never_recorded, {}, {}, party(actor, operation)});
  }

  void release_tag(const void* tag) { checker_.tags_[tag].join(order().release(this_thread())); }
  void acquire_tag(const void* tag) { order().acquire(this_thread(), checker_.tags_[tag]); }

 private:
  [[nodiscard]] Violation::Party party(ActorId actor, std::string_view operation) const {
    return {checker_.order_.name(actor), std::string{operation}};
  }

  AccessChecker& checker_;
  std::unique_lock<std::mutex> lock_;
  std::vector<Violation> found_;
};

}  // namespace block_streamer::inline v1::detail
