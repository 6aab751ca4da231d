// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../support/arguments.hpp"
#include "../support/report.hpp"

#include <block_streamer/core/block_layout.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/storage/ram_storage.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

namespace bs = block_streamer;

struct PageLockOptions {
  explicit PageLockOptions(Arguments& arguments)
      : device{arguments.text("--device", "cuda")},
        mib{std::max<std::size_t>(arguments.number("--mib", 4096), 1)},
        rounds{std::max<std::size_t>(arguments.number("--rounds", 5), 1)} {}

  std::string device;
  std::size_t mib;     ///< of weights, in 36 blocks
  std::size_t rounds;  ///< the tier and its limits take turns
};

/// Seconds from nothing: `ready` includes mapping and the first touch, `lock` is the rest alone.
struct StartUp {
  double ready = 0;
  double lock = 0;
};

class Stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Touched in one thread, as every way is here.
inline void first_touch(std::span<std::byte> bytes) {
  std::memset(bytes.data(), 1, bytes.size());
}

/// @brief The RAM tier's start-up on a backend, beside what else would hold the same bytes.
template <class Backend>
class PageLockBenchmark {
 public:
  using Way = std::function<StartUp(std::size_t byte_count)>;
  static constexpr std::size_t block_count = 36;

  /// @param by_hand     the limit. @param others  named ways that are only shown.
  PageLockBenchmark(Backend backend, const PageLockOptions& options, Report& report, Way by_hand,
                    std::vector<std::pair<std::string, Way>> others)
      : backend_{std::move(backend)},
        options_{options},
        report_{report},
        by_hand_{std::move(by_hand)},
        others_{std::move(others)} {}

  void register_all() {
    register_once(report_, "page_lock/ram_tier", [this](benchmark::State& state) { run(state); });
  }

 private:
  void run(benchmark::State& state) {
    std::vector<double> lock, ready, hand_lock, hand_ready;
    std::vector<std::vector<double>> shown(others_.size());
    for (std::size_t round = 0; round < options_.rounds; ++round) {
      const StartUp ours = ram_tier();
      const StartUp hand = by_hand_(options_.mib << 20);
      lock.push_back(ours.lock), ready.push_back(ours.ready);
      hand_lock.push_back(hand.lock), hand_ready.push_back(hand.ready);
      for (std::size_t i = 0; i < others_.size(); ++i)
        shown[i].push_back(others_[i].second(options_.mib << 20).ready);
    }
    state.SetIterationTime(median(ready));
    if (median(hand_lock) > 0)
      add("lock", median(lock), median(hand_lock), at_most(1.3), locked_note_);
    add("ready", median(ready), median(hand_ready), at_most(1.3), {});
    for (std::size_t i = 0; i < others_.size(); ++i)
      add("ready, " + others_[i].first, median(shown[i]), std::nullopt, std::nullopt, {});
    Row bytes{
        .what = "page-locked / payload", .achieved = share_, .unit = "", .note = locked_note_};
    bytes.ratio = share_;
    bytes.bar = at_most(1.02);
    report_.add(state, bytes);
  }
  void add(const std::string& what, double seconds, std::optional<double> limit,
           std::optional<Bar> bar, const std::string& note) {
    const double gib = static_cast<double>(options_.mib) / 1024;
    Row row{.what = what, .achieved = 1e3 * seconds / gib, .unit = "ms/GiB", .note = note};
    if (limit) {
      row.limit = 1e3 * *limit / gib;
      row.ratio = seconds / *limit;
    }
    row.bar = bar;
    report_.add(row);
  }

  StartUp ram_tier() {
    const Stopwatch all;
    bs::BlockLayout layout;
    layout.slot_byte_count.assign(1, (options_.mib << 20) / block_count);
    bs::RamStorage storage{std::vector<bs::BlockLayout>(block_count, layout)};
    for (std::size_t b = 0; b < block_count; ++b)
      first_touch(storage.writable_bytes(bs::block_at(b)));
    const Stopwatch lock;
    std::vector<typename Backend::HostRegistration> locked;
    std::size_t locked_byte_count = 0;
    for (const auto region : storage.regions()) {
      if (auto registration = backend_.register_host(region)) {
        locked.push_back(std::move(*registration));
        locked_byte_count += region.size();
      }
    }
    const StartUp took{all.seconds(), lock.seconds()};
    const std::size_t payload = block_count * layout.slot_byte_count.front();
    share_ = static_cast<double>(locked_byte_count) / static_cast<double>(payload);
    locked_note_ = locked_byte_count == 0 ? "NOTHING was page-locked" : "";
    return took;
  }

  Backend backend_;
  PageLockOptions options_;
  Report& report_;
  Way by_hand_;
  std::vector<std::pair<std::string, Way>> others_;
  double share_ = 0;
  std::string locked_note_;
};

void run_page_lock_on_cpu(const PageLockOptions& options, Report& report);
/// @brief On CUDA device 0. Only where the build has CUDA.
void run_page_lock_on_cuda(const PageLockOptions& options, Report& report);

}  // namespace block_streamer_benchmarks
