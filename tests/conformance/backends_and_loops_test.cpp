// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/counting_backend.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/io/inline_loop.hpp>
#include <block_streamer/io/io_loop.hpp>
#include <block_streamer/simulation/simulated_backend.hpp>
#include <block_streamer/simulation/virtual_loop.hpp>
#include <block_streamer/testing/backend_conformance.hpp>
#include <block_streamer/testing/faulty_backend.hpp>
#include <block_streamer/testing/loop_conformance.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace testing = bs::testing;

namespace {

const testing::Report fail = [](const testing::Finding& f) {
  FAIL_CHECK(f.promise << ": " << f.found);
};

testing::BackendSuiteOptions in(bs::VirtualClock& clock) {
  testing::BackendSuiteOptions options;
  options.enqueues_from_threads = false;
  options.progress = [&clock] { return clock.run_one(); };
  return options;
}

}  // namespace

TEST_CASE("every backend, decorated or not") {
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    const bs::HostBackend host{mode};
    CHECK(testing::check_execution_backend(host, fail).promises > 20);
    CHECK(testing::check_execution_backend(bs::CountingBackend{host}, fail));
    CHECK(testing::check_execution_backend(testing::FaultyBackend{host}, fail));
    bs::CheckedBackend checked{host};
    CHECK(testing::check_execution_backend(checked, fail));
  }
  bs::VirtualClock clock;
  const bs::DeviceModel model{{5'000'000'000, std::chrono::microseconds{1}},
                              {3'000'000'000, std::chrono::microseconds{2}}};
  CHECK(testing::check_execution_backend(bs::SimulatedBackend{clock, model}, fail, in(clock)));
  CHECK(testing::check_execution_backend(bs::CheckedBackend{bs::SimulatedBackend{clock, model}},
                                         fail, in(clock)));
  clock.run_dry();
}

TEST_CASE("a backend that does not wait is found") {
  struct Hasty : bs::HostBackend {
    Hasty() = default;
    void wait(Stream&, Event&) {}
  };
  std::vector<std::string> found;
  const auto note = [&](const testing::Finding& f) { found.push_back(f.promise); };
  testing::BackendSuiteOptions impatient;
  impatient.patience = std::chrono::seconds{0};
  CHECK_FALSE(testing::check_execution_backend(Hasty{}, note, impatient));
  CHECK(found.front() == "an event that was never recorded is a ContractViolation");
}

TEST_CASE("every loop") {
  bs::IoLoop io;
  CHECK(testing::check_progress_loop(io, fail));
  bs::InlineLoop in_line;
  CHECK(testing::check_progress_loop(in_line, fail));
  bs::VirtualClock clock;
  bs::VirtualLoop in_virtual_time{clock};
  CHECK(testing::check_progress_loop(in_virtual_time, fail, {.posts_from_threads = false}));
}

TEST_CASE("a loop that runs tasks in another order is found") {
  std::vector<std::string> found;
  bs::InlineLoop reversed{[](std::size_t queued) { return queued - 1; }};
  CHECK_FALSE(testing::check_progress_loop(
      reversed, [&](const testing::Finding& f) { found.push_back(f.promise); }));
  CHECK(found.front() == "tasks run once each, in the order of their posts");
}
