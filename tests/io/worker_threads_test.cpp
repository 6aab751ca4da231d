// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/error.hpp>
#include <block_streamer/io/worker_threads.hpp>

#include <atomic>
#include <cstddef>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include <support/catch.hpp>

namespace bs = block_streamer;

TEST_CASE("workers run all that was posted before they end") {
  std::atomic<int> ran = 0;
  for (const std::size_t count : {1U, 3U}) {
    bs::WorkerThreads workers{count};
    for (int i = 0; i < 100; ++i) workers.post([&ran]() noexcept { ++ran; });
  }
  CHECK(ran == 200);
  CHECK_THROWS_AS(bs::WorkerThreads{0}, bs::ContractViolation);
}

TEST_CASE("a thread that the system refuses is an error, and those that run end with it") {
  for (std::size_t refused = 0; refused < 3; ++refused) {
    std::size_t started = 0;
    std::atomic<std::size_t> ended = 0;
    const auto start = [&](std::function<void()> run) {
      if (started == refused) {
        throw std::system_error{std::make_error_code(std::errc::resource_unavailable_try_again)};
      }
      ++started;
      return std::thread{[&ended, run = std::move(run)] {
        run();
        ++ended;
      }};
    };
    try {
      const bs::WorkerThreads workers{3, start};
      FAIL("it runs with fewer threads than were asked for");
    } catch (const bs::StorageError& error) {
      CHECK(error.code() == std::errc::resource_unavailable_try_again);
      CHECK_THAT(error.what(), ContainsSubstring("thread " + std::to_string(refused + 1) +
                                                 " of 3 cannot be started"));
    }
    CHECK(started == refused);
    CHECK(ended == refused);
  }
}
