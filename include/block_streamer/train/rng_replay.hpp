// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief The state of the default random generators that a block may draw from: the CPU's and, for
/// another device, that device's.
/// **Cost.** The CPU state is 5 KiB, a CUDA state 16 bytes; both are host memory, no device wait.
/// Not during graph capture. **Threads.** Each generator is locked while it is read or set.
class RngState {
 public:
  /// @brief Copies the states as they are now.
  [[nodiscard]] static RngState capture(const at::Device& device) {
    RngState state;
    state.device_ = device;
    state.host_state_ = read(at::Device{at::kCPU});
    if (device.type() != at::kCPU) state.device_state_ = read(device);
    return state;
  }

  /// @brief Makes the generators go on from here.
  void apply() const {
    write(at::Device{at::kCPU}, host_state_);
    if (device_state_.defined()) write(device_, device_state_);
  }

  /// @brief The states after both generators were seeded; the callers' own are left as they are.
  [[nodiscard]] static RngState seeded(const at::Device& device, std::uint64_t seed);

  /// @brief What the device's generator was seeded with last.
  [[nodiscard]] static std::uint64_t seed_of(const at::Device& device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock{generator.mutex()};
    return generator.current_seed();
  }

  [[nodiscard]] const at::Device& device() const noexcept { return device_; }

 private:
  RngState() = default;

  [[nodiscard]] static at::Tensor read(const at::Device& device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock{generator.mutex()};
    return generator.get_state();
  }
  static void seed(const at::Device& device, std::uint64_t value) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock{generator.mutex()};
    generator.set_current_seed(value);
  }
  static void write(const at::Device& device, const at::Tensor& state) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock{generator.mutex()};
    generator.set_state(state);
  }

  at::Device device_{at::kCPU};
  at::Tensor host_state_;
  at::Tensor device_state_;
};

/// @brief Replays a captured state inside a scope: the caller's own state is put back at its end,
/// also when the scope ends by an exception.
class RngScope {
 public:
  explicit RngScope(const RngState& replayed) : callers_{RngState::capture(replayed.device())} {
    replayed.apply();
  }
  RngScope(const RngScope&) = delete;
  RngScope& operator=(const RngScope&) = delete;
  ~RngScope() {
    try {
      callers_.apply();
    } catch (...) {  // only a lost device refuses a state that it gave itself
    }
  }

 private:
  RngState callers_;
};

inline RngState RngState::seeded(const at::Device& device, std::uint64_t value) {
  const RngScope callers{capture(device)};
  seed(at::Device{at::kCPU}, value);
  if (device.type() != at::kCPU) seed(device, value);
  return capture(device);
}

/// @brief Inside the scope random numbers come from a stream that goes on where its last scope
/// ended; the caller's stream goes on after it as if nothing had been drawn.
class RngTurn {
 public:
  /// @param own  of the stream, moved on at the end of the scope; null: the caller's is drawn from.
  explicit RngTurn(RngState* own) : own_{own} {
    if (own_ == nullptr) return;
    callers_.emplace(RngState::capture(own_->device()));
    own_->apply();
  }
  RngTurn(const RngTurn&) = delete;
  RngTurn& operator=(const RngTurn&) = delete;
  ~RngTurn() {
    if (own_ == nullptr) return;
    try {
      *own_ = RngState::capture(own_->device());
      callers_->apply();
    } catch (...) {  // only a lost device refuses a state that it gave itself
    }
  }

 private:
  RngState* own_;
  std::optional<RngState> callers_;
};

}  // namespace block_streamer::inline v1
