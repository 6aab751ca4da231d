// SPDX-License-Identifier: Apache-2.0
// How much memory a pipeline page-locks over each tier, and that it gives all of it back.
#include <block_streamer/pipeline/pass.hpp>

#include <storage/every_tier.hpp>
#include <storage/pattern_files.hpp>
#include <support/catch.hpp>
#include <support/lock_limit.hpp>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

void stream(bs::AnyStorage tier, support::LockLimit& lock, int rounds) {
  support::LimitedBackend backend{bs::HostMode::detached, lock};
  auto compute = backend.make_stream();
  bs::BlockPipeline<support::LimitedBackend> pipeline{std::move(tier), backend,
                                                      Streamed::small_chunks()};
  const auto order = bs::ascending(0, pipeline.storage().block_count());
  for (int round = 0; round < rounds; ++round) {
    {
      auto pass = pipeline.begin_pass(order, order, compute);
      while (!pass.done()) static_cast<void>(pass.acquire());
    }
    CHECK(lock.locked > 0);
    const std::uint64_t most = lock.most;
    pipeline.close();  // what a tier has in memory stays locked, staging does not
    CHECK((pipeline.shape().memory_block_count > 0 || lock.locked == 0));
    CHECK(lock.most == most);
  }
}

}  // namespace

TEST_CASE("b32 b36 b37 what is page-locked is the staging and what lies in memory, for as long") {
  const PatternFiles files;
  std::uint64_t payload = 0, kept = 0;
  for (std::size_t b = 0; b < files.images.size(); ++b) {
    payload += files.images[b].size();
    if (b % 2 == 0) kept += bs::round_up(files.images[b].size(), 4096);  // a region each
  }
  const std::uint64_t staging = Streamed::small_chunks().staging_byte_count;
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    support::LockLimit lock;
    for (int made = 0; made < 20; ++made) {
      stream(tier.make(files.map), lock, 2);
      REQUIRE(lock.locked == 0);
    }
    if (tier.name == "ram") {
      CHECK(static_cast<double>(lock.most) <= 1.02 * static_cast<double>(payload));
    } else if (tier.name.starts_with("tiered")) {
      CHECK(lock.most <= kept + 8192 + staging);
    } else {
      CHECK(lock.most <= staging);  // no mapping of a file, whatever its size
    }
  }
}
