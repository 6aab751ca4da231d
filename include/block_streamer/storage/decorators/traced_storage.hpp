// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/block_image.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/storage_tier.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// What a trace takes its time from.
template <class C>
concept trace_clock = std::copyable<C> && requires(const C& clock) {
  { clock() }
  noexcept->std::same_as<Nanoseconds>;
};

/// The clock of the backends that run in real time.
struct SteadyTraceClock {
  [[nodiscard]] Nanoseconds operator()() const noexcept {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
};

/// @brief A tier whose reads appear in a trace, each from its request to its completion, named
/// "tier read" or "failed tier read". Put one on each level of a tier over others, with a lane or a
/// device number of its own, to see which level a read went to. An addressable tier stays so; what
/// is copied from its memory is not a read.
/// **Threads.** As the inner tier. **Cost.** Two time stamps and an allocation a read while the
/// sink is enabled; one branch otherwise.
template <storage_tier Inner, trace_clock Clock = SteadyTraceClock>
class TracedStorage {
 public:
  /// @param device  the row of the timeline: TraceEvent::device.
  TracedStorage(Inner inner, TraceSinkRef sink, Lane lane = Lane::storage, std::uint16_t device = 0,
                Clock clock = {})
      : inner_{std::move(inner)}, sink_{sink}, lane_{lane}, device_{device}, clock_{clock} {}

  [[nodiscard]] std::size_t block_count() const noexcept { return inner_.block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return inner_.image(block);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    if (!sink_.enabled()) return inner_.async_read(block, range, out, std::move(done));
    TraceEvent event{"tier read", lane_, device_, {block}, clock_(), {}, range.byte_count};
    // Nothing here refers to the decorator, which may be gone as soon as the inner tier is.
    inner_.async_read(block, range, out,
                      [sink = sink_, clock = clock_, event, done = std::move(done)](
                          std::error_code error, std::size_t byte_count) mutable {
                        event.end = clock();
                        if (error) event.name = "failed tier read";
                        sink.record(event);
                        done(error, byte_count);
                      });
  }
  [[nodiscard]] std::span<const std::byte> bytes(BlockId block) const noexcept requires
      addressable_tier<Inner> {
    return inner_.bytes(block);
  }
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept requires
      addressable_tier<Inner> {
    return inner_.regions();
  }
  /// @brief Whether it is, where the inner tier says so only at run time.
  [[nodiscard]] bool addressable() const noexcept requires addressable_tier<Inner> {
    if constexpr (requires(const Inner& inner) { inner.addressable(); }) {
      return inner_.addressable();
    } else {
      return true;
    }
  }
  [[nodiscard]] bool in_memory(BlockId block) const noexcept requires
      partly_addressable_tier<Inner> {
    return inner_.in_memory(block);
  }
  void prepare(std::span<std::byte> memory) noexcept requires preparing_tier<Inner> {
    inner_.prepare(memory);
  }
  void forget(std::span<std::byte> memory) noexcept requires preparing_tier<Inner> {
    inner_.forget(memory);
  }
  [[nodiscard]] std::string locate(BlockId block,
                                   std::uint64_t image_offset) const requires locating_tier<Inner> {
    return inner_.locate(block, image_offset);
  }

 private:
  Inner inner_;
  TraceSinkRef sink_;
  Lane lane_;
  std::uint16_t device_;
  Clock clock_;
};
static_assert(partly_addressable_tier<TracedStorage<AnyStorage>> &&
              locating_tier<TracedStorage<AnyStorage>> &&
              preparing_tier<TracedStorage<AnyStorage>>);

}  // namespace block_streamer::inline v1
