// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/trace/residency_transition.hpp>

#include <concepts>

namespace block_streamer::inline v1 {

/// @brief Sees every change of every slot.
/// - `observe(transition)`: called once for each transition, in issue order (`sequence` ascending).
///   Calls never overlap, but come from the visitor's and from the I/O loop's thread, with the
///   pipeline's mutex held: it never throws, never blocks and never calls into the streamer.
/// **Lifetime.** An observer outlives every object that was given a ResidencyObserverRef to it.
template <class T>
concept residency_observer = requires(T& observer, const Transition& transition) {
  { observer.observe(transition) }
  noexcept->std::same_as<void>;
};

/// Non-owning, erased, so that an observer's type never multiplies instantiations. Default: nobody.
class ResidencyObserverRef {
 public:
  ResidencyObserverRef() noexcept = default;
  template <class T>
  requires(!std::same_as<T, ResidencyObserverRef> && residency_observer<T>)
      ResidencyObserverRef(T& observer)
  noexcept  // NOLINT(google-explicit-constructor): a reference to an observer converts
      : observer_{&observer},
        observe_{[](void* o, const Transition& t) noexcept { static_cast<T*>(o)->observe(t); }} {}

  /// @brief Passes the transition on; does nothing where nobody observes.
  void observe(const Transition& transition) noexcept {
    if (observer_ != nullptr) observe_(observer_, transition);
  }
  explicit operator bool() const noexcept { return observer_ != nullptr; }

 private:
  void* observer_ = nullptr;
  void (*observe_)(void*, const Transition&) noexcept = nullptr;
};
static_assert(residency_observer<ResidencyObserverRef>);

}  // namespace block_streamer::inline v1
