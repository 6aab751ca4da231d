// SPDX-License-Identifier: Apache-2.0
// A completion port whose answers a test decides.
#pragma once

#include <block_streamer/io/iocp_runtime.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <vector>

namespace block_streamer::testing_support {

/// What happens to the n-th request, counted from 0, and what was seen. The port's thread reads and
/// writes it; the test before the first read and after the last.
struct IocpScript {
  std::map<std::size_t, std::size_t> shorten;  ///< the n-th gives at most so many bytes
  std::size_t shorten_all = 0;                 ///< 0: as many as asked
  std::map<std::size_t, DWORD> refuse;         ///< the n-th is refused with this error
  std::uint32_t shuffle = 0;                   ///< seed: answers come late and in another order
  bool hold = false;                           ///< nothing is asked before release()

  std::vector<std::uint64_t> offsets;  ///< asked for, in order
  std::size_t most_in_flight = 0;

  void release() {
    const std::scoped_lock lock{mutex};
    hold = false;
    changed.notify_all();
  }
  template <class Condition>
  void wait(Condition condition) {
    std::unique_lock lock{mutex};
    changed.wait(lock, condition);
  }
  void count(std::size_t& what) {
    const std::scoped_lock lock{mutex};
    ++what;
    changed.notify_all();
  }

  std::mutex mutex;  // guards what follows, and `hold`
  std::condition_variable changed;
  std::size_t reads_begun = 0;
  std::size_t waits_begun = 0;  ///< with requests in the system
};

class ScriptedCalls {
 public:
  ScriptedCalls(IocpScript& script) noexcept  // NOLINT(google-explicit-constructor)
      : script_{&script} {}

  [[nodiscard]] DWORD read(HANDLE file, std::span<std::byte> out, OVERLAPPED* overlapped) noexcept {
    script_->count(script_->reads_begun);
    script_->wait([this] { return !script_->hold; });
    const std::size_t number = script_->offsets.size();
    script_->offsets.push_back(std::uint64_t{overlapped->OffsetHigh} << 32 | overlapped->Offset);
    if (const auto code = script_->refuse.find(number); code != script_->refuse.end()) {
      return code->second;
    }
    if (const auto most = script_->shorten.find(number); most != script_->shorten.end()) {
      out = out.first(std::min(out.size(), most->second));
    }
    if (script_->shorten_all != 0) out = out.first(std::min(out.size(), script_->shorten_all));
    script_->most_in_flight = std::max(script_->most_in_flight, ++in_flight_);
    return system_.read(file, out, overlapped);
  }

  /// Shuffled: takes all answers that are there, then gives one of them.
  [[nodiscard]] std::size_t wait(HANDLE port, std::span<OVERLAPPED_ENTRY> entries) noexcept {
    if (in_flight_ != 0) script_->count(script_->waits_begun);
    if (script_->shuffle == 0) {
      const std::size_t count = system_.wait(port, entries);
      for (const auto& entry : entries.first(count)) in_flight_ -= entry.lpOverlapped ? 1 : 0;
      return count;
    }
    ULONG count = 0;
    do {
      const DWORD patience = held_.empty() ? INFINITE : 0;
      if (::GetQueuedCompletionStatusEx(port, entries.data(), static_cast<ULONG>(entries.size()),
                                        &count, patience, FALSE) == 0) {
        count = 0;
      }
      held_.insert(held_.end(), entries.begin(), entries.begin() + count);
    } while (count != 0);
    const std::size_t chosen = random_() % held_.size();
    entries[0] = held_[chosen];
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(chosen));
    in_flight_ -= entries[0].lpOverlapped != nullptr ? 1 : 0;
    return 1;
  }

 private:
  IocpScript* script_;
  SystemIocpCalls system_;
  std::vector<OVERLAPPED_ENTRY> held_;
  std::size_t in_flight_ = 0;
  std::mt19937 random_{script_->shuffle};
};

using ScriptedRuntime = BasicIocpRuntime<ScriptedCalls>;

}  // namespace block_streamer::testing_support
