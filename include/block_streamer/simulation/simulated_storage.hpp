// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/simulation/transfer_cost.hpp>
#include <block_streamer/simulation/virtual_clock.hpp>
#include <block_streamer/storage/read_contract.hpp>
#include <block_streamer/storage/storage_tier.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// A drive: up to `depth` reads are in service, whose latencies overlap; their bytes then come one
/// read after another. With no latency it delivers in the order of the requests.
struct DriveModel {
  TransferCost cost;
  std::uint32_t depth = 32;
  /// False: reads do not share the drive's link, as if each had its own.
  bool one_link = true;
  /// Latency of the n-th read on top of the model's own; lets reads overtake each other.
  std::function<Nanoseconds(std::uint64_t number)> delay{};
};

/// @brief A storage tier in virtual time. The bytes are real, and whoever looks before a read has
/// completed sees poison. Records each read's time on the drive in Lane::storage.
/// **Threads.** One. **Lifetime.** The clock's; the destructor lets virtual time pass until all
/// reads have ended.
class SimulatedStorage {
 public:
  /// Fills `out` with the bytes of an image range.
  using Contents = std::function<void(BlockId, ByteRange, std::span<std::byte> out)>;
  static constexpr std::byte poison{0xDB};

  SimulatedStorage(VirtualClock& clock, std::vector<BlockImage> images, DriveModel drive,
                   Contents contents, TraceSinkRef trace = {})
      : state_{std::make_unique<State>(clock, std::move(images), std::move(drive),
                                       std::move(contents), trace)} {
    expects(state_->drive.depth > 0, "a drive serves at least one read at a time");
  }
  [[nodiscard]] std::size_t block_count() const noexcept { return state_->images.size(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return state_->images[index_of(block)];
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    State& state = *state_;
    const auto read = std::make_shared<Read>(Read{block, range, out, std::move(done), {}, {}});
    const std::uint64_t number = state.accepted++;
    if (const std::error_code refused = check_read(*this, block, range, out)) {
      return state.clock.after({}, [&state, read, refused] { state.end(*read, refused); });
    }
    std::ranges::fill(out, poison);
    read->latency = state.drive.cost.latency;
    if (state.drive.delay) read->latency += state.drive.delay(number);
    state.waiting.push_back(read);
    state.admit();
  }
  /// @brief Reads that were begun.
  [[nodiscard]] std::uint64_t read_count() const noexcept { return state_->accepted; }

 private:
  struct Read {
    BlockId block;
    ByteRange range;
    std::span<std::byte> out;
    IoCompletion done;
    Nanoseconds latency;
    Nanoseconds begin;
  };
  struct State {
    State(VirtualClock& c, std::vector<BlockImage> i, DriveModel d, Contents bytes, TraceSinkRef t)
        : clock{c},
          images{std::move(i)},
          drive{std::move(d)},
          contents{std::move(bytes)},
          trace{t} {}
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    ~State() {
      clock.run_until([this] { return accepted == ended; });
    }

    VirtualClock& clock;
    std::vector<BlockImage> images;
    DriveModel drive;
    Contents contents;
    TraceSinkRef trace;
    std::deque<std::shared_ptr<Read>> waiting;  ///< for a place in the drive's queue
    std::deque<std::shared_ptr<Read>> found;    ///< their latency is over
    std::uint32_t in_service = 0;
    bool transferring = false;
    std::uint64_t accepted = 0;
    std::uint64_t ended = 0;

    void admit() {
      while (in_service < drive.depth && !waiting.empty()) {
        ++in_service;
        const auto read = std::exchange(waiting.front(), nullptr);
        waiting.pop_front();
        if (read->latency == Nanoseconds::zero()) {
          found.push_back(read);
          transfer();
        } else {
          clock.after(read->latency, [this, read] {
            found.push_back(read);
            transfer();
          });
        }
      }
    }
    void transfer() {
      if ((drive.one_link && transferring) || found.empty()) return;
      transferring = true;
      const auto read = std::exchange(found.front(), nullptr);
      found.pop_front();
      read->begin = clock.now();
      clock.after(drive.cost.byte_time(read->range.byte_count), [this, read] {
        contents(read->block, read->range, read->out);
        if (trace.enabled()) {
          trace.record({"read",
                        Lane::storage,
                        0,
                        {read->block},
                        read->begin,
                        clock.now(),
                        read->range.byte_count});
        }
        transferring = false;
        --in_service;
        transfer();
        admit();
        end(*read, {});
      });
    }
    void end(Read& read, std::error_code error) {
      ++ended;
      read.done(error, error ? 0 : static_cast<std::size_t>(read.range.byte_count));
    }
  };
  std::unique_ptr<State> state_;
};
static_assert(storage_tier<SimulatedStorage>);

}  // namespace block_streamer::inline v1
