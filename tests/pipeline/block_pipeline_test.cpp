// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/storage/pooled.hpp>

#include <support/catch.hpp>

#include <numeric>
#include <optional>

#include "pipeline_run.hpp"

namespace bs = block_streamer;
using bs::HostBackend;
using bs::HostMode;
using support::small_options;

namespace {

/// Counts the spans of finishers.
struct ConvertSpans {
  std::uint64_t count = 0;
  std::uint64_t byte_count = 0;
  [[nodiscard]] bool enabled() const noexcept { return true; }
  void record(const bs::TraceEvent& event) noexcept {
    if (event.name != "convert" || event.lane != bs::Lane::compute) return;
    ++count;
    byte_count += event.byte_count;
  }
};

enum class TierKind { inline_reads, held_reads, memory };

bs::AnyStorage make_tier(TierKind kind, const std::vector<bs::BlockImage>& images,
                         support::ReadScript& script) {
  if (kind == TierKind::memory) return support::MemoryTier{images};
  script.hold = kind == TierKind::held_reads;
  return support::ScriptedTier{images, script};
}

}  // namespace

TEST_CASE("every visit sees its bytes: tiers x backends x depths x chunk sizes") {
  std::size_t combinations = 0;
  for (const auto kind : {TierKind::inline_reads, TierKind::held_reads, TierKind::memory}) {
    for (const auto host : {HostMode::attached, HostMode::detached}) {
      for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
        for (const std::uint64_t chunk : {64U, 1000U, 1U << 20}) {
          for (const std::uint64_t budget : {0U, 60000U}) {
            const auto images = support::odd_images(8);
            support::ReadScript script;
            std::mt19937 random{ahead};
            auto options = small_options(ahead);
            options.chunk_byte_count = chunk;
            options.device_budget = budget;
            support::ResidencyCount count;
            options.observer = count;
            using Pipeline = bs::BlockPipeline<HostBackend, bs::InlineLoop>;
            HostBackend backend{host};
            auto compute = backend.make_stream();
            Pipeline pipeline{
                make_tier(kind, images, script), backend, options, nullptr,
                std::make_unique<bs::InlineLoop>(
                    [&](std::size_t) { return random(); },
                    [&] { return script.release(random()) || host == HostMode::detached; })};
            const auto forward = bs::ascending(0, 8), backward = bs::descending(1, 8);
            for (int step = 0; step < 2; ++step) {
              CHECK(support::run_pass(pipeline, images, forward, bs::joined(backward, forward),
                                      compute) == 0);
              CHECK(support::run_pass(pipeline, images, backward, bs::joined(forward, backward),
                                      compute) == 0);
            }
            pipeline.drain();
            CHECK(count.peak <= pipeline.slot_count());
            const auto& slots = pipeline.shape().slot_byte_counts;
            CHECK(std::accumulate(slots.begin(), slots.end(), std::uint64_t{0}) <=
                  (ahead + 1) * bs::round_up(pipeline.shape().slot_byte_count, 256) + budget);
            if (budget == 0) CHECK(pipeline.slot_count() == ahead + 1);
            CHECK(count.in_order);
            const auto statistics = pipeline.statistics();
            CHECK(statistics.passes == 4);
            CHECK(statistics.visits == 30);
            CHECK(statistics.peak_resident_blocks == count.peak);
            CHECK(statistics.bytes_read == (kind == TierKind::memory ? 0 : script.bytes));
            if (kind != TierKind::memory && host == HostMode::attached)
              CHECK(statistics.bytes_read == statistics.bytes_needed);
            CHECK(statistics.bytes_copied ==
                  (pipeline.mode() == bs::FetchMode::in_place ? 0 : statistics.bytes_needed));
            CHECK(pipeline.staging_byte_count() <= (pipeline.mode() == bs::FetchMode::staged
                                                        ? options.staging_byte_count + (1U << 20)
                                                        : 0));
            ++combinations;
          }
        }
      }
    }
  }
  WARN(combinations << " combinations");
}

TEST_CASE("traffic equals the plan: once per pass without a cache, nothing when all is resident") {
  const auto images = support::odd_images(6);
  for (const auto host : {HostMode::attached, HostMode::detached}) {
    for (const bool cached : {false, true}) {
      support::ReadScript script;
      auto options = small_options(1);
      options.prefetch_next_pass = false;
      options.device_budget = cached ? 1 << 20 : 0;
      HostBackend backend{host};
      auto compute = backend.make_stream();
      bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                              options};
      const auto order = bs::ascending(0, 6);
      CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
      CHECK(pipeline.statistics().bytes_needed == support::payload(images));
      pipeline.reset_statistics();
      CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
      CHECK(pipeline.statistics().bytes_needed == (cached ? 0 : support::payload(images)));
      CHECK(pipeline.statistics().fetches == (cached ? 0 : 6));
    }
  }
}

TEST_CASE("a real loop, a pool of readers and a detached device: 50 passes") {
  const auto images = support::odd_images(9, 16);
  struct Reader {
    std::shared_ptr<std::vector<bs::BlockImage>> images;
    std::size_t block_count() const noexcept { return images->size(); }
    const bs::BlockImage& image(bs::BlockId b) const noexcept { return (*images)[bs::index_of(b)]; }
    std::error_code read(bs::BlockId b, bs::ByteRange r, std::span<std::byte> out) {
      for (std::uint64_t i = 0; i < r.byte_count; ++i)
        out[i] = support::image_byte(bs::index_of(b), r.offset + i);
      return {};
    }
  };
  for (const auto host : {HostMode::attached, HostMode::detached}) {
    auto options = small_options(2);
    options.staging_byte_count = 2 * 1008;  // two chunks: starved
    HostBackend backend{host};
    auto compute = backend.make_stream();
    bs::BlockPipeline<HostBackend> pipeline{
        bs::Pooled{Reader{std::make_shared<std::vector<bs::BlockImage>>(images)}, 3}, backend,
        options};
    const auto order = bs::ascending(0, 9);
    for (int pass = 0; pass < 50; ++pass) {
      REQUIRE(support::run_pass(pipeline, images, order, bs::joined(order, order), compute) == 0);
    }
  }
}

TEST_CASE("a pass may be moved, given up, and followed by another") {
  const auto images = support::odd_images(6);
  support::ReadScript script;
  HostBackend backend{HostMode::detached};
  auto compute = backend.make_stream();
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  const auto order = bs::ascending(0, 6);
  for (std::size_t stop = 0; stop < 6; ++stop) {
    auto begun = pipeline.begin_pass(order, order, compute);
    auto pass = std::move(begun);
    for (std::size_t i = 0; i < stop; ++i) {
      const auto lease = pass.acquire();
      CHECK(support::slot_is_right(images[i], i, lease.bytes()));
    }
  }
  CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
}

TEST_CASE("a pass may be moved while a lease of it lives, and ends a lease that would outlive it") {
  const auto images = support::odd_images(6);
  const auto order = bs::ascending(0, 6);
  for (const auto mode : {HostMode::attached, HostMode::detached}) {
    support::ReadScript script;
    HostBackend backend{mode};
    auto compute = backend.make_stream();
    bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                            small_options(1)};
    using Pass = bs::BlockPipeline<HostBackend>::Pass;
    std::optional<Pass> passes[2];  // the pass is in one, then in the other
    passes[0].emplace(pipeline.begin_pass(order, order, compute));
    for (std::size_t i = 0; i < 6; ++i) {
      std::optional<Pass>&here = passes[i % 2], &there = passes[(i + 1) % 2];
      auto lease = here->acquire();
      const auto moved_lease = std::move(lease);
      there.emplace(std::move(*here));
      here.reset();
      CHECK_THROWS_AS(there->acquire(), bs::ContractViolation);
      CHECK(support::slot_is_right(images[i], i, moved_lease.bytes()));
    }  // the lease ends with the pass at its new place
    CHECK(passes[0]->done());
    passes[0].reset();
    CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);

    passes[0].emplace(pipeline.begin_pass(order, order, compute));
    {
      const auto lease = passes[0]->acquire();
      passes[0].reset();
      CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
    }
    CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
    CHECK(pipeline.statistics().visits == 6 + 6 + 1 + 6 + 6);
  }
}

TEST_CASE("a finisher's bound form is what the visit sees, and the wire slot is free at once") {
  struct Doubler final : bs::Finisher<HostBackend> {
    const std::vector<bs::BlockImage>* images;
    explicit Doubler(const std::vector<bs::BlockImage>& held) : images{&held} {}
    std::uint64_t bound_byte_count(bs::PartId p) const override {
      return 2 * (*images)[bs::index_of(p.block)].layout.slot_byte_count[0];
    }
    void enqueue(bs::PartId, std::span<const std::byte> wire, std::span<std::byte> bound,
                 HostBackend::Stream&) override {
      for (std::size_t i = 0; i < wire.size(); ++i) bound[2 * i] = bound[2 * i + 1] = wire[i];
    }
  };
  const auto images = support::odd_images(5);
  for (const auto host : {HostMode::attached, HostMode::detached}) {
    support::ReadScript script;
    HostBackend backend{host};
    auto compute = backend.make_stream();
    ConvertSpans spans;
    auto options = small_options(0);
    options.trace = spans;
    bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend, options,
                                            std::make_unique<Doubler>(images)};
    std::uint64_t converted = 0;
    std::uint64_t largest = 0;
    for (const auto& image : images)
      largest = std::max(largest, 2 * image.layout.slot_byte_count[0]);
    CHECK(pipeline.statistics().bound_bytes == 0);
    for (int round = 0; round < 3; ++round) {
      auto pass = pipeline.begin_pass(bs::ascending(0, 5), bs::ascending(0, 5), compute);
      for (std::size_t b = 0; b < 5; ++b) {
        const auto lease = pass.acquire();
        converted += lease.bytes().size();
        for (const auto& s : images[b].segments) {
          for (std::uint64_t i = 0; i < s.byte_count; ++i) {
            REQUIRE(lease.bytes()[2 * (s.slot_offset + i)] ==
                    support::image_byte(b, s.image_offset + i));
          }
        }
      }
    }
    CHECK(pipeline.statistics().bytes_converted == converted);
    CHECK(spans.count == 15);
    CHECK(spans.byte_count == converted);
    CHECK(pipeline.statistics().bound_bytes == largest);
    pipeline.close();
    CHECK(pipeline.statistics().bound_bytes == 0);
  }
}

TEST_CASE("closing gives the memory back, and the pipeline works again") {
  const auto images = support::odd_images(4);
  support::ReadScript script;
  HostBackend backend{HostMode::detached};
  auto compute = backend.make_stream();
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  const auto order = bs::ascending(0, 4);
  CHECK_FALSE(pipeline.is_open());
  for (int round = 0; round < 3; ++round) {
    CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
    CHECK(pipeline.is_open());
    pipeline.close();
    CHECK_FALSE(pipeline.is_open());
    CHECK(pipeline.statistics().resident_blocks == 0);
  }
  pipeline.drain();
}

TEST_CASE("what cannot work is refused") {
  const auto images = support::odd_images(4);
  support::ReadScript script;
  HostBackend backend;
  auto compute = backend.make_stream();
  const auto order = bs::ascending(0, 4);
  SECTION("a block above the slot budget is refused before a byte is read") {
    auto options = small_options(1);
    options.slot_byte_budget = 10;
    using Pipeline = bs::BlockPipeline<HostBackend>;
    CHECK_THROWS_WITH((Pipeline{support::ScriptedTier{images, script}, backend, options}),
                      ContainsSubstring("needs a slot of") && ContainsSubstring("budget is 10"));
    CHECK(script.reads == 0);
  }
  SECTION("overlapping passes and leases") {
    bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                            small_options(1)};
    auto pass = pipeline.begin_pass(order, {}, compute);
    CHECK_THROWS_AS(pipeline.begin_pass(order, {}, compute), bs::ContractViolation);
    const auto lease = pass.acquire();
    CHECK_THROWS_AS(pass.acquire(), bs::ContractViolation);
    CHECK_THROWS_AS(pipeline.close(), bs::ContractViolation);
  }
  SECTION("an empty list and impossible options") {
    using Pipeline = bs::BlockPipeline<HostBackend>;
    CHECK_THROWS_AS((Pipeline{support::ScriptedTier{{}, script}, backend, small_options(1)}),
                    bs::ContractViolation);
    auto options = small_options(1);
    options.chunk_byte_count = 0;
    CHECK_THROWS_AS((Pipeline{support::ScriptedTier{images, script}, backend, options}),
                    bs::ContractViolation);
  }
}
