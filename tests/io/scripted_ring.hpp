// SPDX-License-Identifier: Apache-2.0
// Rings whose answers a test decides: one without the system, and one that tampers with the
// system's.
#pragma once

#include <block_streamer/io/ring_read.hpp>
#include <block_streamer/io/uring_options.hpp>
#include <block_streamer/io/uring_ring.hpp>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace block_streamer::testing_support {

/// Decides about the n-th request, counted from 0: how many bytes are read of it, or an error.
struct Verdict {
  std::int32_t error = 0;                        ///< negative: the answer, nothing is read
  std::uint64_t byte_count = ~std::uint64_t{0};  ///< at most so many are read
};

/// What the rings of a test are told, and what they saw. Outlives them.
struct RingScript {
  std::function<Verdict(std::uint64_t n, const RingRead&)> judge =
      [](std::uint64_t, const RingRead&) { return Verdict{}; };
  std::function<int(std::uint64_t n)> submit = [](std::uint64_t) { return 0; };  ///< 0 or an error
  bool newest_first = false;  ///< order of the answers
  std::uint32_t queue_capacity = 1U << 20;
  bool pin = true;

  // On the heap, so that the thread sanitizer does not take it for the lock of another test.
  std::unique_ptr<std::mutex> owned_mutex = std::make_unique<std::mutex>();
  std::mutex& mutex = *owned_mutex;  // guards what follows
  std::condition_variable woken;
  bool wake = false;
  bool held = false;  ///< no answer until let go
  std::uint64_t requests = 0;
  std::uint64_t submissions = 0;
  std::size_t in_flight = 0;
  std::size_t most_in_flight = 0;
  std::uint64_t fixed_requests = 0;
  std::vector<RingRead> seen;

  void let_go() {
    const std::scoped_lock lock{mutex};
    held = false;
    wake = true;
    woken.notify_all();
  }
  void wait_for_requests(std::uint64_t count) {
    std::unique_lock lock{mutex};
    woken.wait(lock, [&] { return requests >= count; });
  }
};

/// Reads by itself, when its answers are asked for.
class ScriptedRing {
 public:
  explicit ScriptedRing(RingScript& script) : script_{script} {}
  static auto opener(RingScript& script) {
    return [&script](const UringOptions&, UringReport& report) {
      report.setup = "scripted";
      return std::make_unique<ScriptedRing>(script);
    };
  }

  bool push(const RingRead& read) {
    if (queued_.size() >= script_.queue_capacity) return false;
    queued_.push_back(read);
    return true;
  }
  int submit_and_wait() {
    std::unique_lock lock{script_.mutex};
    if (const int error = script_.submit(script_.submissions++); error != 0) return error;
    for (const RingRead& read : queued_) {
      taken_.push_back({read, script_.judge(script_.requests++, read)});
      script_.seen.push_back(read);
      script_.fixed_requests += read.buffer ? 1 : 0;
    }
    queued_.clear();
    script_.in_flight = taken_.size();
    script_.most_in_flight = std::max(script_.most_in_flight, script_.in_flight);
    script_.woken.notify_all();
    script_.woken.wait(lock, [&] { return script_.wake || (!taken_.empty() && !script_.held); });
    script_.wake = false;
    return 0;
  }
  template <class Take>
  void take_back(Take&& take) {
    for (const RingRead& read : std::exchange(queued_, {})) take(read.tag);
  }
  void pause() {}
  template <class Take>
  void reap(Take&& take) {
    {
      const std::scoped_lock lock{script_.mutex};
      if (script_.held) return;
      script_.in_flight = 0;
    }
    auto answers = std::exchange(taken_, {});
    if (script_.newest_first) std::ranges::reverse(answers);
    for (const auto& [read, verdict] : answers) take(read.tag, perform(read, verdict));
  }
  void wake() {
    const std::scoped_lock lock{script_.mutex};
    script_.wake = true;
    script_.woken.notify_all();
  }
  std::error_code add_buffer(std::uint32_t index, std::span<std::byte>) {
    if (!script_.pin) return std::make_error_code(std::errc::not_enough_memory);
    pinned_.insert(index);
    return {};
  }
  void remove_buffer(std::uint32_t index) { pinned_.erase(index); }

 private:
  static std::int32_t perform(const RingRead& read, const Verdict& verdict) {
    if (verdict.error != 0) return verdict.error;
    const std::size_t count = std::min<std::uint64_t>(read.out.size(), verdict.byte_count);
    if (count == 0) return 0;
    // Through a buffer of its own: the script may cut where O_DIRECT would not.
    std::vector<std::byte> bytes(count + 2 * 4096);
    auto* const at = bytes.data() + (4096 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 4096);
    const std::size_t asked = std::min(read.out.size(), (count + 511) / 512 * 512);
    const ssize_t got = ::pread(read.descriptor, at, asked, static_cast<off_t>(read.offset));
    if (got < 0) return -errno;
    const std::size_t kept = std::min(count, static_cast<std::size_t>(got));
    std::copy_n(at, kept, read.out.begin());
    return static_cast<std::int32_t>(kept);
  }

  RingScript& script_;
  std::vector<RingRead> queued_;
  std::vector<std::pair<RingRead, Verdict>> taken_;
  std::set<std::uint32_t> pinned_;
};
static_assert(read_ring<ScriptedRing>);

}  // namespace block_streamer::testing_support
