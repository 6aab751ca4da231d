// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/execution_backend.hpp>

namespace block_streamer::inline v1 {

/// @brief A backend that has to be told how host threads order themselves (CheckedBackend): it sees
/// streams and events, but not the caller's mutexes.
/// - `host_release(tag)`: what this thread did so far may be relied on by who acquires `tag` later.
/// - `host_acquire(tag)`: this thread comes after every release of `tag` so far.
template <class B>
concept host_edge_backend = execution_backend<B> && requires(B& backend, const void* tag) {
  { backend.host_release(tag) }
  noexcept->std::same_as<void>;
  { backend.host_acquire(tag) }
  noexcept->std::same_as<void>;
};

/// @brief Tells a checking backend, if it is one, that this thread publishes by `tag`: call it
/// before unlocking a mutex, posting a task or leaving a thread. **Cost.** None otherwise.
template <execution_backend Backend>
void publish_host_edge([[maybe_unused]] Backend& backend,
                       [[maybe_unused]] const void* tag) noexcept {
  if constexpr (host_edge_backend<Backend>) backend.host_release(tag);
}

/// @brief The other end: call it after locking, at the start of the task, after joining.
template <execution_backend Backend>
void accept_host_edge([[maybe_unused]] Backend& backend,
                      [[maybe_unused]] const void* tag) noexcept {
  if constexpr (host_edge_backend<Backend>) backend.host_acquire(tag);
}

}  // namespace block_streamer::inline v1
