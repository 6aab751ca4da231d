// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>

namespace block_streamer::inline v1 {

/// @brief How operations of the calling thread are cast: for the CPU, for one more device, and
/// whether casts of weights are remembered.
/// **Threads.** The state is each thread's own.
class AutocastState {
 public:
  [[nodiscard]] static AutocastState capture(const at::Device& device) {
    return {of(at::kCPU), of(device.type()), at::autocast::is_autocast_cache_enabled()};
  }

  /// @brief Makes the calling thread cast like this.
  void apply() const {
    for (const Casts& casts : casts_) {
      at::autocast::set_autocast_dtype(casts.type, casts.dtype);
      at::autocast::set_autocast_enabled(casts.type, casts.enabled);
    }
    at::autocast::set_autocast_cache_enabled(remembers_);
  }
  [[nodiscard]] bool casts() const noexcept { return casts_[0].enabled || casts_[1].enabled; }
  friend bool operator==(const AutocastState&, const AutocastState&) = default;

 private:
  struct Casts {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
    friend bool operator==(const Casts&, const Casts&) = default;
  };
  AutocastState(Casts host, Casts device, bool remembers) noexcept
      : casts_{host, device}, remembers_{remembers} {}
  [[nodiscard]] static Casts of(at::DeviceType type) {
    return {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
  }

  std::array<Casts, 2> casts_;  ///< the second may be the first again
  bool remembers_;
};

/// @brief Forgets the casts of weights that autocast remembers, if the calling thread casts at all.
/// They must not outlive a visit: a slot has other bytes then, and what was cast without grad has
/// no gradient.
/// **Cost.** The memory of casts is the whole process's: other weights are cast again at their next
/// use.
inline void forget_casts(const at::Device& device) {
  if (AutocastState::capture(device).casts()) at::autocast::clear_cache();
}

/// @brief Casts as a captured state says inside a scope, and remembers no cast beyond it; then as
/// before, also when the scope ends by an exception.
class AutocastScope {
 public:
  AutocastScope(const AutocastState& replayed, const at::Device& device)
      : callers_{AutocastState::capture(device)}, casts_{replayed.casts()} {
    replayed.apply();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
  ~AutocastScope() {
    if (casts_) at::autocast::clear_cache();
    callers_.apply();
  }

 private:
  AutocastState callers_;
  bool casts_;
};

}  // namespace block_streamer::inline v1
