// SPDX-License-Identifier: Apache-2.0
// What the pipeline does around a pass that a graph of the device repeats; graphs themselves need a
// device (tests/streamer).
#include <block_streamer/pipeline/recorded_pass.hpp>

#include <support/catch.hpp>

#include <functional>

#include "pipeline_run.hpp"

namespace bs = block_streamer;
using bs::HostBackend;
using bs::HostMode;
using Pipeline = bs::BlockPipeline<HostBackend, bs::InlineLoop>;

namespace {

constexpr std::size_t block_count = 8;

bs::PipelineOptions options_with(std::uint32_t ahead, std::uint64_t budget) {
  bs::PipelineOptions options;
  options.prefetch_ahead = ahead;
  options.device_budget = budget;
  return options;
}

/// A pipeline over a tier in memory, and the stream that its passes compute on.
struct Setup {
  std::vector<bs::BlockImage> images = support::odd_images(block_count);
  HostBackend backend{HostMode::detached};
  HostBackend::Stream compute = backend.make_stream();
  Pipeline pipeline;

  explicit Setup(const bs::PipelineOptions& options)
      : pipeline{support::MemoryTier{images}, backend, options} {}

  /// Visits of a pass whose bytes are wrong once the device has come to them.
  std::size_t wrong_visits(Pipeline::Pass pass) {
    std::size_t wrong = 0;
    while (!pass.done()) {
      const auto lease = pass.acquire();
      auto reached = backend.make_event();
      backend.record(reached, compute);
      backend.synchronize(reached);
      const std::size_t block = bs::index_of(lease.part().block);
      wrong += support::slot_is_right(images[block], block, lease.bytes()) ? 0 : 1;
    }
    return wrong;
  }
  std::size_t plain_pass() {
    const auto order = bs::ascending(0, block_count);
    return wrong_visits(pipeline.begin_pass(order, order, compute));
  }
  bs::RepeatedPlan record() {
    bs::RepeatedPlan plan = pipeline.prepare_recording(bs::ascending(0, block_count), compute);
    CHECK(wrong_visits(pipeline.begin_recording(plan, compute)) == 0);
    pipeline.end_recording(plan, /*failed=*/false);
    return plan;
  }
};

}  // namespace

TEST_CASE("a recording counts nothing; each replay counts as the pass that it does") {
  for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
    for (const std::uint64_t budget : {0U, 60000U, 10000000U}) {
      Setup setup{options_with(ahead, budget)};
      CHECK(setup.plain_pass() == 0);
      setup.pipeline.reset_statistics();
      const bs::Statistics before = setup.pipeline.statistics();
      const bs::RepeatedPlan plan = setup.record();
      bs::Statistics after = setup.pipeline.statistics();
      CHECK(after.passes == before.passes);
      CHECK(after.visits == before.visits);
      CHECK(after.fetches == before.fetches);
      CHECK(after.bytes_copied == before.bytes_copied);
      for (int i = 0; i < 3; ++i) {
        int launched = 0;
        setup.pipeline.replay(plan, setup.compute, [&] { ++launched; });
        CHECK(launched == 1);
      }
      after = setup.pipeline.statistics();
      INFO("ahead " << ahead << " budget " << budget);
      CHECK(after.passes == 3);
      CHECK(after.visits == 3 * block_count);
      CHECK(after.fetches == 3 * plan.plan.fetches.size());
      CHECK(after.bytes_copied == after.bytes_needed);
    }
  }
}

TEST_CASE("passes between replays find their bytes, and replays what they keep") {
  for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
    for (const std::uint64_t budget : {0U, 60000U}) {
      Setup setup{options_with(ahead, budget)};
      const bs::RepeatedPlan plan = setup.record();
      for (int i = 0; i < 3; ++i) {
        CHECK(setup.plain_pass() == 0);
        setup.pipeline.replay(plan, setup.compute, [&] {
          for (std::uint32_t slot = 0; slot < plan.kept.size(); ++slot) {  // as the graph finds it
            if (!plan.kept[slot]) continue;
            const auto history = setup.pipeline.history();
            const auto last = std::find_if(history.rbegin(), history.rend(),
                                           [&](const auto& t) { return t.slot == slot; });
            REQUIRE(last != history.rend());
            CHECK(last->part == *plan.kept[slot]);
            CHECK(last->to != bs::Residency::empty);
          }
        });
        // The replay copied nothing here, so that what it leaves is taken from the recording.
        setup.pipeline.forget(bs::ascending(0, block_count));
      }
      CHECK(setup.plain_pass() == 0);
    }
  }
}

TEST_CASE("a pass that returns finds what it begins with, also after others") {
  for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
    for (const std::uint64_t budget : {0U, 60000U}) {
      for (const std::size_t last : {std::size_t{0}, std::size_t{5}}) {
        Setup setup{options_with(ahead, budget)};
        const auto order = bs::ascending(0, block_count);
        const bs::RepeatedPlan plan = setup.pipeline.prepare_recording(order, setup.compute, last);
        CHECK(setup.wrong_visits(setup.pipeline.begin_recording(plan, setup.compute)) == 0);
        setup.pipeline.end_recording(plan, /*failed=*/false);
        INFO("ahead " << ahead << " budget " << budget << " last " << last);
        for (int i = 0; i < 4; ++i) {
          if (i == 2) CHECK(setup.plain_pass() == 0);
          setup.pipeline.drain();
          setup.pipeline.reset_statistics();
          setup.pipeline.replay(plan, setup.compute, [&] {
            for (std::uint32_t slot = 0; slot < plan.begins.size(); ++slot) {
              if (!plan.begins[slot]) continue;
              const auto history = setup.pipeline.history();
              const auto found = std::find_if(history.rbegin(), history.rend(),
                                              [&](const auto& t) { return t.slot == slot; });
              REQUIRE(found != history.rend());
              CHECK(found->part == *plan.begins[slot]);
              CHECK(found->to != bs::Residency::empty);
            }
          });
          const bs::Statistics after = setup.pipeline.statistics();
          CHECK(after.visits == 2 * block_count - last);
          if (i % 2 == 1) CHECK(after.fetches == plan.plan.fetches.size());  // nothing came between
        }
      }
    }
  }
}

TEST_CASE("a recording that fails leaves nothing resident and no failure behind") {
  Setup setup{options_with(1, 60000)};
  const bs::RepeatedPlan plan =
      setup.pipeline.prepare_recording(bs::ascending(0, block_count), setup.compute);
  {
    auto pass = setup.pipeline.begin_recording(plan, setup.compute);
    for (int visit = 0; visit < 3; ++visit) {
      auto lease = pass.acquire();
      if (visit == 2) lease.discard();
    }
  }
  setup.pipeline.end_recording(plan, /*failed=*/true);
  CHECK(setup.pipeline.statistics().resident_blocks == 0);
  CHECK(setup.plain_pass() == 0);
  setup.record();
  CHECK(setup.plain_pass() == 0);
}

TEST_CASE("closing changes what recorded passes know the addresses by") {
  Setup setup{options_with(1, 0)};
  CHECK(setup.plain_pass() == 0);
  const auto opened = setup.pipeline.opened();
  CHECK(setup.plain_pass() == 0);
  CHECK(setup.pipeline.opened() == opened);
  setup.pipeline.close();
  CHECK(setup.plain_pass() == 0);
  CHECK(setup.pipeline.opened() != opened);
}

TEST_CASE("why a pass cannot be recorded is said") {
  const auto images = support::odd_images(3);
  support::ReadScript script;
  HostBackend detached{HostMode::detached};
  const auto why = [&](bs::AnyStorage storage, bool computes_on_host) {
    auto options = options_with(1, 0);
    options.computes_on_host = computes_on_host;
    return Pipeline{std::move(storage), detached, options}.why_not_recorded();
  };
  CHECK(why(support::MemoryTier{images}, false).empty());
  CHECK(why(support::MemoryTier{images}, true) == "its blocks compute on the host");
  CHECK(why(support::ScriptedTier{images, script}, false) ==
        "its storage has 0 of 3 blocks in memory, and a graph cannot wait for reads");
}

TEST_CASE("a replay whose launch throws leaves the pipeline usable, with nothing resident") {
  Setup setup{options_with(1, 60000)};
  const bs::RepeatedPlan plan = setup.record();
  const auto fail = [] { throw std::runtime_error{"no"}; };
  CHECK_THROWS_AS(setup.pipeline.replay(plan, setup.compute, fail), std::runtime_error);
  CHECK(setup.pipeline.statistics().resident_blocks == 0);
  CHECK(setup.pipeline.statistics().visits == 0);
  CHECK(setup.plain_pass() == 0);
  setup.pipeline.replay(plan, setup.compute, [] {});
  CHECK(setup.pipeline.statistics().visits == 2 * block_count);
}
