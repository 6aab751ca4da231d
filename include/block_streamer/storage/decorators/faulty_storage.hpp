// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/decorators/fault_script.hpp>
#include <block_streamer/storage/storage_tier.hpp>

#include <algorithm>
#include <cassert>
#include <memory>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A tier whose reads fail, fall short, come late or in another order, as a FaultScript
/// says. For tests of what sits above a tier. Never addressable: every byte goes through a read.
/// **Lifetime.** The destructor ends held reads with operation_canceled and waits for the others.
template <class Inner>
class FaultyStorage {
 public:
  FaultyStorage(Inner inner, FaultScript& script)
      : state_{std::make_unique<State>(std::move(inner), script)} {}

  [[nodiscard]] std::size_t block_count() const noexcept { return state_->inner.block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return state_->inner.image(block);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    State* state = state_.get();
    const FaultScript::Fate fate = state->script.start();
    state->script.begin(fate.number, [state, block, range, out, fate, done = std::move(done)](
                                         std::error_code canceled, std::size_t) mutable {
      if (canceled) {
        done(canceled, 0);
      } else {
        state->read(block, range, out, fate, std::move(done));
      }
    });
  }
  [[nodiscard]] std::string locate(BlockId block,
                                   std::uint64_t image_offset) const requires locating_tier<Inner> {
    return state_->inner.locate(block, image_offset);
  }

 private:
  struct State {
    State(Inner held, FaultScript& rules) : script{rules}, inner{std::move(held)} {}
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    ~State() { script.close(); }

    void read(BlockId block, ByteRange range, std::span<std::byte> out,
              const FaultScript::Fate& fate, IoCompletion done) noexcept {
      if (fate.error) {
        report(fate.number, fate.error, 0, std::move(done));
        return;
      }
      std::error_code outcome;
      if (fate.byte_count && *fate.byte_count < range.byte_count) {
        outcome = std::make_error_code(std::errc::io_error);
        range.byte_count = round_down(*fate.byte_count, inner.image(block).read_granularity);
        out = out.first(static_cast<std::size_t>(range.byte_count));
      }
      inner.async_read(block, range, out,
                       [this, number = fate.number, outcome, done = std::move(done)](
                           std::error_code error, std::size_t byte_count) mutable {
                         if (!error) error = outcome;
                         report(number, error, error ? 0 : byte_count, std::move(done));
                       });
    }
    void report(FaultScript::Number number, std::error_code error, std::size_t byte_count,
                IoCompletion done) {
      script.end(number, [error, byte_count, done = std::move(done)](
                             std::error_code, std::size_t) mutable { done(error, byte_count); });
    }

    FaultScript& script;
    Inner inner;  // last: its destructor waits, after close() has let go what was held
  };
  std::unique_ptr<State> state_;
};
static_assert(storage_tier<FaultyStorage<AnyStorage>>);

}  // namespace block_streamer::inline v1
