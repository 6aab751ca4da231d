// SPDX-License-Identifier: Apache-2.0
// A tier of which some blocks are in memory, page-locked as far as the system lets it; and slots
// that budgets and costs shape.
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/storage/tiered_storage.hpp>

#include <support/catch.hpp>
#include <support/lock_limit.hpp>

#include <memory>
#include <numeric>
#include <optional>

#include "pipeline_run.hpp"

namespace bs = block_streamer;
using bs::HostBackend;
using bs::HostMode;
using support::LimitedBackend;
using support::LockLimit;
using support::plain_images;
using support::small_options;

namespace {

std::vector<std::uint8_t> flags(std::size_t count, std::uint32_t bits) {
  std::vector<std::uint8_t> result;
  for (std::size_t i = 0; i < count; ++i) result.push_back(bits >> i & 1U);
  return result;
}

/// Refuses the n-th copy.
struct CopyFault {
  int fails_in = -1;
};
struct RefusingBackend : HostBackend {
  RefusingBackend(HostMode mode, CopyFault& f) : HostBackend{mode}, fault{&f} {}
  [[nodiscard]] bool host_addressable() const noexcept { return false; }
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from, bs::CopyDirection d,
                  Stream& stream) {
    if (fault->fails_in >= 0 && fault->fails_in-- == 0) throw bs::DeviceError{"copy refused", 1};
    HostBackend::copy_async(to, from, d, stream);
  }
  CopyFault* fault;
};

std::uint64_t payload_of(const std::vector<bs::BlockImage>& images,
                         const std::vector<std::uint8_t>& which, std::uint8_t flag) {
  std::vector<bs::BlockImage> some;
  for (std::size_t b = 0; b < images.size(); ++b) {
    if (which[b] == flag) some.push_back(images[b]);
  }
  return support::payload(some);
}

}  // namespace

TEST_CASE("every visit sees its bytes: sets in memory x backends x depths x arrivals") {
  const auto images = support::odd_images(6);
  for (const std::uint32_t set : {0U, 0b111111U, 0b010101U, 0b000111U, 0b110000U, 0b100001U}) {
    for (const auto host : {HostMode::attached, HostMode::detached}) {
      for (std::uint32_t ahead = 0; ahead <= 4; ++ahead) {
        for (const std::uint64_t staging : {1000U, 4096U}) {
          support::ReadScript script;
          script.hold = true;
          auto options = small_options(ahead);
          options.staging_byte_count = staging;
          options.device_budget = ahead % 2 == 0 ? 0 : 30000;
          std::mt19937 random{set + ahead};
          HostBackend backend{host};
          auto compute = backend.make_stream();
          const auto in_memory = flags(6, set);
          bs::BlockPipeline<HostBackend, bs::InlineLoop> pipeline{
              support::MixedTier{images, script, in_memory}, backend, options, nullptr,
              std::make_unique<bs::InlineLoop>(
                  [&](std::size_t) { return random(); },
                  [&] { return script.release(random()) || host == HostMode::detached; })};
          const auto forward = bs::ascending(0, 6), backward = bs::descending(1, 6);
          for (int step = 0; step < 3; ++step) {
            CHECK(support::run_pass(pipeline, images, forward, bs::joined(backward, forward),
                                    compute) == 0);
            CHECK(support::run_pass(pipeline, images, backward, bs::joined(forward, backward),
                                    compute) == 0);
          }
          pipeline.drain();
          const bool all = set == 0b111111U;
          CHECK(pipeline.mode() == (all                          ? bs::FetchMode::addressed
                                    : host == HostMode::attached ? bs::FetchMode::in_place
                                                                 : bs::FetchMode::staged));
          CHECK(pipeline.statistics().bytes_read == script.bytes);
          if (pipeline.mode() != bs::FetchMode::in_place)
            CHECK(pipeline.statistics().bytes_copied == pipeline.statistics().bytes_needed);
        }
      }
    }
  }
}

TEST_CASE("what is in page-locked memory is not read") {
  const auto images = support::odd_images(8);
  const auto in_memory = flags(8, 0b01010101);
  support::ReadScript script;
  HostBackend backend{HostMode::detached};
  auto compute = backend.make_stream();
  auto options = small_options(1);
  options.prefetch_next_pass = false;
  options.chunk_byte_count = 1 << 20;
  options.staging_byte_count = 1 << 20;
  bs::BlockPipeline<HostBackend> pipeline{support::MixedTier{images, script, in_memory}, backend,
                                          options};
  CHECK(support::run_pass(pipeline, images, bs::ascending(0, 8), {}, compute) == 0);
  CHECK(pipeline.shape().memory_block_count == 4);
  CHECK(pipeline.shape().locked_block_count == 4);
  const auto statistics = pipeline.statistics();
  CHECK(statistics.bytes_needed == support::payload(images));
  CHECK(statistics.bytes_copied == support::payload(images));
  CHECK(statistics.bytes_read == script.bytes);
  CHECK(statistics.bytes_read >= payload_of(images, in_memory, 0));
  CHECK(statistics.bytes_read < support::payload(images));
}

TEST_CASE("page-locking that fails part-way leaves the rest to staging, which is locked first") {
  const auto images = plain_images(10, 5000);
  std::optional<std::uint32_t> before;
  for (std::uint64_t limit = 0; limit <= 60'000; limit += 2500) {
    LockLimit lock{limit, 0, 0};
    {
      support::ReadScript script;
      LimitedBackend backend{HostMode::detached, lock};
      auto compute = backend.make_stream();
      auto options = small_options(1);
      options.chunk_byte_count = 4096;
      bs::BlockPipeline<LimitedBackend> pipeline{
          support::MixedTier{images, script, flags(10, 0b1111111111)}, backend, options};
      for (int pass = 0; pass < 3; ++pass) {
        CHECK(support::run_pass(pipeline, images, bs::ascending(0, 10), bs::ascending(0, 10),
                                compute) == 0);
      }
      const auto locked = pipeline.shape().locked_block_count;
      CAPTURE(limit, locked);
      CHECK(pipeline.shape().memory_block_count == 10);
      CHECK(locked >= before.value_or(0));
      before = locked;
      CHECK(lock.most <= limit);
      CHECK(lock.locked <= limit);
      if (limit >= 50'000) {
        CHECK(locked == 10);
        CHECK(pipeline.mode() == bs::FetchMode::addressed);
      } else {
        CHECK(pipeline.mode() == bs::FetchMode::staged);
        CHECK(locked < 10);
        // One block's worth was given back, so the staging chunk found room.
        if (limit >= 10'000) CHECK(lock.locked == locked * 5000 + 4096);
        CHECK(locked == (limit < 5000 ? 0 : limit / 5000 - 1));
      }
    }
    CHECK(lock.locked == 0);
  }
}

TEST_CASE("a tiered storage streams what is not in memory, over a real loop") {
  const auto images = support::odd_images(9, 16);
  struct Reader {
    std::shared_ptr<const std::vector<bs::BlockImage>> images;
    std::size_t block_count() const noexcept { return images->size(); }
    const bs::BlockImage& image(bs::BlockId b) const noexcept { return (*images)[bs::index_of(b)]; }
    std::error_code read(bs::BlockId b, bs::ByteRange r, std::span<std::byte> out) {
      for (std::uint64_t i = 0; i < r.byte_count; ++i)
        out[i] = support::image_byte(bs::index_of(b), r.offset + i);
      return {};
    }
  };
  for (const auto host : {HostMode::attached, HostMode::detached}) {
    for (const std::uint64_t limit : {std::uint64_t{0}, std::uint64_t{40'000}, ~std::uint64_t{0}}) {
      auto options = small_options(2);
      options.staging_byte_count = 2 * 1008;
      LockLimit lock{limit, 0, 0};
      LimitedBackend backend{host, lock};
      auto compute = backend.make_stream();
      bs::BlockPipeline<LimitedBackend> pipeline{
          bs::TieredStorage::within(
              bs::Pooled{Reader{std::make_shared<const std::vector<bs::BlockImage>>(images)}, 3},
              30'000),
          backend, options};
      const auto order = bs::ascending(0, 9);
      for (int pass = 0; pass < 20; ++pass) {
        REQUIRE(support::run_pass(pipeline, images, order, bs::joined(order, order), compute) == 0);
      }
    }
  }
}

TEST_CASE("a copy out of memory that the device refuses is told once, and the next pass works") {
  const auto images = plain_images(6, 3000);
  for (const std::uint32_t set : {0b111111U, 0b010101U}) {
    for (int failing = 0; failing < 8; ++failing) {
      support::ReadScript script;
      CopyFault fault{failing};
      RefusingBackend backend{HostMode::attached, fault};
      auto compute = backend.make_stream();
      bs::BlockPipeline<RefusingBackend> pipeline{support::MixedTier{images, script, flags(6, set)},
                                                  backend, small_options(1)};
      const auto order = bs::ascending(0, 6);
      int told = 0;
      for (int pass = 0; pass < 4; ++pass) {
        try {
          const std::size_t wrong = support::run_pass(pipeline, images, order, order, compute);
          CHECK(wrong == 0);
        } catch (const bs::DeviceError&) {
          ++told;
        }
      }
      CHECK(told == 1);
    }
  }
}

TEST_CASE("a large block takes no more of the device than it must") {
  auto images = plain_images(11, 1024);
  images[10] = plain_images(1, 8192)[0];
  support::ReadScript script;
  HostBackend backend{HostMode::detached};
  auto compute = backend.make_stream();
  auto options = small_options(1);
  options.device_budget = 5 * 1024;
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend, options};
  CHECK(pipeline.slot_count() == 7);
  const auto& slots = pipeline.shape().slot_byte_counts;
  CHECK(std::accumulate(slots.begin(), slots.end(), std::uint64_t{0}) == 2 * 8192 + 5 * 1024);
  const auto order = bs::ascending(0, 11);
  for (int pass = 0; pass < 4; ++pass) {
    CHECK(support::run_pass(pipeline, images, order, bs::joined(order, order), compute) == 0);
  }
}

TEST_CASE("with costs the blocks that stream lie between those that stay") {
  const auto images = plain_images(16, 1024);
  support::ReadScript script;
  HostBackend backend{HostMode::detached};
  auto compute = backend.make_stream();
  auto options = small_options(1);
  options.device_budget = 8 * 1024;
  options.prefetch_next_pass = false;
  options.costs = bs::PassCosts{std::vector<bs::BlockCost>(16, {2, 0, 1})};
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend, options};
  REQUIRE(pipeline.slot_count() == 10);
  const auto order = bs::ascending(0, 16);
  for (int pass = 0; pass < 4; ++pass) {
    pipeline.reset_statistics();
    CHECK(support::run_pass(pipeline, images, order, bs::joined(order, order), compute) == 0);
  }
  CHECK(pipeline.statistics().fetches == 8);
}

TEST_CASE("budgets and slots that cannot be are refused, with their sizes") {
  support::ReadScript script;
  HostBackend backend;
  using Pipeline = bs::BlockPipeline<HostBackend>;
  auto options = small_options(1);
  SECTION("a device budget smaller than one block") {
    options.device_budget = 1000;
    CHECK_THROWS_WITH(
        (Pipeline{support::ScriptedTier{plain_images(4, 3000), script}, backend, options}),
        ContainsSubstring("1000") && ContainsSubstring("3072"));
  }
  SECTION("more slots than memory") {
    auto images = plain_images(4, 3000);
    for (auto& image : images) image.layout.slot_byte_count = {std::uint64_t{1} << 50};
    options.prefetch_ahead = 2;
    CHECK_THROWS_WITH((Pipeline{support::ScriptedTier{images, script}, backend, options}),
                      ContainsSubstring("3 slots") && ContainsSubstring("available") &&
                          ContainsSubstring("prefetch_ahead"));
  }
  SECTION("more slots than device memory") {
    auto images = plain_images(4, 3000);
    for (auto& image : images) image.layout.slot_byte_count = {std::uint64_t{1} << 62};
    HostBackend device{HostMode::detached};
    auto compute = device.make_stream();
    Pipeline pipeline{support::ScriptedTier{images, script}, device, options};
    CHECK_THROWS_WITH(pipeline.begin_pass(bs::ascending(0, 4), {}, compute),
                      ContainsSubstring("2 slots") && ContainsSubstring("device_budget"));
  }
  SECTION("costs of another list") {
    options.costs = bs::PassCosts{std::vector<bs::BlockCost>(3)};
    CHECK_THROWS_AS(
        (Pipeline{support::ScriptedTier{plain_images(4, 3000), script}, backend, options}),
        bs::ContractViolation);
  }
  CHECK(script.reads == 0);
}
