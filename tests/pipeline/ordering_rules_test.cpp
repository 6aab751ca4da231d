// SPDX-License-Identifier: Apache-2.0
// Each ordering rule is removed in turn; what proves it must then fail, and must not fail with the
// rule in place.
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/pipeline/pass.hpp>

#include <support/catch.hpp>

#include "pipeline_run.hpp"

namespace bs = block_streamer;

namespace {

/// Runs at once, so that every run is the same, but may not be read in place: the clocks order what
/// is checked, not the timing.
struct OtherMemory : bs::HostBackend {
  OtherMemory() : bs::HostBackend{bs::HostMode::attached} {}
  [[nodiscard]] bool host_addressable() const noexcept { return false; }
};
using Backend = bs::CheckedBackend<OtherMemory>;

struct Outcome {
  std::size_t violations = 0;
  std::size_t loop_tasks = 0;
  bool stuck_or_refused = false;
};

/// A loop without a thread that counts what is posted to it.
struct CountingLoop : bs::InlineLoop {
  using bs::InlineLoop::InlineLoop;
  std::size_t posts = 0;
  void post(void (*task)(void*) noexcept, void* context) {
    ++posts;
    bs::InlineLoop::post(task, context);
  }
};

struct Scene {
  bool memory_tier = false;
  bool one_in_memory = false;
  bool reverse_arrivals = false;
  bool throw_in_block = false;
  std::uint32_t ahead = 1;
};

/// Three passes on a checked device, in which only streams order things.
template <class Rules>
Outcome play(const Scene& scene) {
  const auto images = support::odd_images(6, 1, 5);
  support::ReadScript script;
  script.hold = scene.reverse_arrivals;
  Backend backend;
  bs::ViolationLog log = backend.log();
  Outcome outcome;
  {
    auto compute = backend.make_stream();
    bs::PipelineOptions options;
    options.prefetch_ahead = scene.ahead;
    options.chunk_byte_count = 900;
    options.staging_byte_count = 40 * 900;
    options.prefetch_next_pass = false;
    auto loop = std::make_unique<CountingLoop>(bs::InlineLoop::Order{}, [&script] {
      if (script.held.empty()) return false;
      return script.release(script.held.size() - 1);  // the last asked for arrives first
    });
    CountingLoop& tasks = *loop;
    bs::AnyStorage tier = support::ScriptedTier{images, script};
    if (scene.memory_tier) tier = support::MemoryTier{images};
    if (scene.one_in_memory) tier = support::MixedTier{images, script, {0, 1, 0, 0, 0, 0}};
    // Notifications of the device arrive on a thread of its own: waiting for them is not being
    // stuck.
    bs::BlockPipeline<Backend, CountingLoop, Rules> pipeline{std::move(tier), backend, options,
                                                             nullptr, std::move(loop)};
    const auto order = bs::ascending(0, 6);
    for (int pass_number = 0; pass_number < 3; ++pass_number) {
      try {
        auto pass = pipeline.begin_pass(order, order, compute);
        while (!pass.done()) {
          const auto lease = pass.acquire();
          if (scene.throw_in_block && pass_number == 1 && bs::index_of(lease.part().block) == 3) {
            throw std::runtime_error{"the block failed"};
          }
        }
      } catch (const bs::ContractViolation& violation) {
        UNSCOPED_INFO(violation.what());
        outcome.stuck_or_refused = true;
        break;
      } catch (const std::runtime_error&) {
      }
    }
    outcome.loop_tasks = tasks.posts;
    script.hold = false;
    while (script.release(0)) {
    }
  }
  outcome.violations = log.count();
  return outcome;
}

struct WithoutReleaseWait : bs::AllOrderingRules {
  static constexpr bool wait_for_release = false;
};
struct WithoutGate : bs::AllOrderingRules {
  static constexpr bool begin_after_release = false;
};
struct InOrderOfArrival : bs::AllOrderingRules {
  static constexpr bool copy_in_plan_order = false;
};
struct LoopCopiesRam : bs::AllOrderingRules {
  static constexpr bool visitor_copies_ram = false;
};
struct WithoutFork : bs::AllOrderingRules {
  static constexpr bool fork_copies = false;
};
struct ReleaseOnSuccessOnly : bs::AllOrderingRules {
  static constexpr bool release_always = false;
};

}  // namespace

TEST_CASE("with all rules every access is ordered") {
  for (const bool memory : {false, true}) {
    for (const bool reverse : {false, true}) {
      for (const bool throwing : {false, true}) {
        for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
          for (const bool mixed : {false, true}) {
            const Outcome outcome = play<bs::AllOrderingRules>(
                {memory && !mixed, mixed, reverse && (!memory || mixed), throwing, ahead});
            CHECK(outcome.violations == 0);
            CHECK_FALSE(outcome.stuck_or_refused);
          }
        }
      }
    }
  }
}

TEST_CASE("rule 1: without the wait for the release, a copy overwrites a slot that is still read") {
  CHECK(play<WithoutReleaseWait>({}).violations > 0);
  CHECK(play<WithoutReleaseWait>({.memory_tier = true}).violations > 0);
  CHECK(play<WithoutReleaseWait>({.one_in_memory = true}).violations > 0);
}

TEST_CASE("rule 2: without the gate a fetch takes a slot whose visit is still to come") {
  CHECK(play<WithoutGate>({.memory_tier = true}).stuck_or_refused);
  CHECK(play<WithoutGate>({}).stuck_or_refused);
}

TEST_CASE(
    "rule 3: copies in order of arrival leave a part that counts as ready before its last byte") {
  CHECK(play<InOrderOfArrival>({.reverse_arrivals = true}).violations > 0);
  CHECK(play<InOrderOfArrival>({.one_in_memory = true, .reverse_arrivals = true}).violations > 0);
}

TEST_CASE("rule 4: a tier in RAM needs no loop, a tier that is read needs no visitor") {
  CHECK(play<bs::AllOrderingRules>({.memory_tier = true}).loop_tasks == 0);
  CHECK(play<LoopCopiesRam>({.memory_tier = true}).loop_tasks > 0);
  CHECK(play<bs::AllOrderingRules>({.one_in_memory = true}).loop_tasks > 0);
}

TEST_CASE(
    "rule 5: without the fork the first copies of a pass overwrite what the pass before computes "
    "with") {
  CHECK(play<WithoutFork>({}).violations > 0);
  CHECK(play<WithoutFork>({.memory_tier = true}).violations > 0);
}

TEST_CASE(
    "rule 6: a lease that skips its release after an exception leaves a slot that cannot be "
    "refilled") {
  CHECK(play<ReleaseOnSuccessOnly>({.throw_in_block = true}).stuck_or_refused);
  CHECK(play<ReleaseOnSuccessOnly>({.memory_tier = true, .throw_in_block = true}).stuck_or_refused);
}
