// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/access_history.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

enum class ViolationKind : std::uint8_t {
  unordered_access,          ///< two accesses, one a write, without a happens-before edge
  unregistered_host_memory,  ///< an asynchronous copy whose host side is not page-locked
  event_never_recorded,      ///< somebody waits for an event that nobody recorded
};

/// What a CheckedBackend found. The fields that a kind does not need are empty.
struct Violation {
  struct Party {
    std::string actor;      ///< "stream 2", "host thread 0"
    std::string operation;  ///< "copy_async writes"
  };
  ViolationKind kind = ViolationKind::unordered_access;
  AddressRange range;
  Party earlier;
  Party later;
};

[[nodiscard]] inline std::string to_string(const Violation& violation) {
  const auto party = [](const Violation::Party& p) { return p.operation + " on " + p.actor; };
  const std::string bytes = std::to_string(violation.range.end - violation.range.begin) +
                            " bytes at address " + std::to_string(violation.range.begin);
  switch (violation.kind) {
    case ViolationKind::unordered_access:
      return party(violation.later) + " is not ordered after " + party(violation.earlier) + ": " +
             bytes;
    case ViolationKind::unregistered_host_memory:
      return party(violation.later) + " uses host memory that is not registered: " + bytes;
    case ViolationKind::event_never_recorded:
      return party(violation.later) + ": the event was never recorded";
  }
  return {};
}

/// @brief The violations of one CheckedBackend and all its copies, in the order of their finding.
/// A copyable handle to one list (hence the shared_ptr): a test keeps it beyond the backend.
/// **Threads.** Everything from any thread.
class ViolationLog {
 public:
  /// Beyond this many they are counted but not kept.
  static constexpr std::size_t kept = 256;
  using Callback = std::function<void(const Violation&)>;

  ViolationLog() : shared_{std::make_shared<Shared>()} {}

  [[nodiscard]] bool empty() const { return count() == 0; }
  [[nodiscard]] std::size_t count() const {
    const std::lock_guard lock{shared_->mutex};
    return shared_->count;
  }
  [[nodiscard]] std::vector<Violation> violations() const {
    const std::lock_guard lock{shared_->mutex};
    return shared_->violations;
  }
  void clear() {
    const std::lock_guard lock{shared_->mutex};
    shared_->count = 0;
    shared_->violations.clear();
  }

  /// @brief Called with each violation on the thread that found it. It must not throw.
  void on_violation(Callback callback) {
    const std::lock_guard lock{shared_->mutex};
    shared_->callback = std::move(callback);
  }

  void add(const Violation& violation) {
    Callback callback;
    {
      const std::lock_guard lock{shared_->mutex};
      if (++shared_->count <= kept) shared_->violations.push_back(violation);
      callback = shared_->callback;
    }
    if (callback) callback(violation);
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::size_t count = 0;
    std::vector<Violation> violations;
    Callback callback;
  };
  std::shared_ptr<Shared> shared_;
};

/// @brief One line a violation; empty if there is none. For a test's message.
[[nodiscard]] inline std::string to_string(const ViolationLog& log) {
  std::string text;
  for (const Violation& violation : log.violations()) text += to_string(violation) + "\n";
  return text;
}

}  // namespace block_streamer::inline v1
