// SPDX-License-Identifier: Apache-2.0
#include "mapped_by_hand.hpp"
#include "page_lock_benchmark.hpp"

#include <block_streamer/device/host_backend.hpp>

namespace block_streamer_benchmarks {

void run_page_lock_on_cpu(const PageLockOptions& options, Report& report) {
  const auto by_hand = [](std::size_t byte_count) {
    const Stopwatch all;
    MappedByHand memory{byte_count};
    first_touch(memory.bytes());
    return StartUp{all.seconds(), 0};
  };
  PageLockBenchmark<bs::HostBackend> page_lock{bs::HostBackend{}, options, report, by_hand, {}};
  page_lock.register_all();
  benchmark::RunSpecifiedBenchmarks();
}

}  // namespace block_streamer_benchmarks
