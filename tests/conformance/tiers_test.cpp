// SPDX-License-Identifier: Apache-2.0
// Every tier, plain and under every decorator and pairs of them, through the suite that ships.
#include <block_streamer/simulation/simulated_storage.hpp>
#include <block_streamer/storage/decorators/faulty_storage.hpp>
#include <block_streamer/storage/decorators/traced_storage.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/pooled.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/storage/tiered_storage.hpp>
#if !defined(_WIN32)
#include <block_streamer/storage/uring_storage.hpp>
#endif
#include <block_streamer/testing/storage_conformance.hpp>
#include <block_streamer/trace/perfetto_writer.hpp>

#include <storage/pattern_files.hpp>
#include <storage/pattern_reader.hpp>
#include <support/catch.hpp>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

template <class Tier>
void conforms(Tier tier, const Images& images, bs::testing::TierSuiteOptions options = {}) {
  options.refuses_bad_ranges = true;
  const auto found = bs::testing::check_storage_tier(
      std::move(tier), images,
      [](const bs::testing::Finding& f) { FAIL_CHECK(f.promise << ": " << f.found); }, options);
  CHECK(found.promises > 500);
}

/// Every decorator around what `make` makes, and one inside the other.
template <class Make>
void conforms_decorated(Make make, const Images& images) {
  bs::PerfettoWriter trace;
  conforms(make(), images);
  conforms(bs::AnyStorage{make()}, images);
  conforms(bs::TracedStorage{make(), trace}, images);
  bs::FaultScript plain, late, traced, erased;
  for (std::uint64_t n = 0; n < 400; n += 3) late.delay(n, 2);
  conforms(bs::FaultyStorage{make(), plain}, images);
  conforms(bs::FaultyStorage{make(), late}, images);
  conforms(bs::TracedStorage{bs::FaultyStorage{make(), traced}, trace}, images);
  conforms(bs::FaultyStorage{bs::TracedStorage{bs::AnyStorage{make()}, trace}, erased}, images);
  CHECK(trace.size() > 500);
}

}  // namespace

TEST_CASE("files on a thread pool") {
  const PatternFiles files;
  conforms_decorated([&] { return bs::FileStorage{files.map, 3}; }, files.images);
}
TEST_CASE("mapped files") {
  const PatternFiles files;
  conforms_decorated([&] { return bs::MappedStorage{files.map, 2}; }, files.images);
}
TEST_CASE("memory") {
  const PatternFiles files;
  conforms_decorated([&] { return bs::RamStorage::load(files.map, 2); }, files.images);
}
TEST_CASE("files, some of their blocks in memory") {
  const PatternFiles files;
  conforms_decorated(
      [&] {
        return bs::TieredStorage{bs::FileStorage{files.map, 2}, {1, 0, 1, 1, 0}};
      },
      files.images);
}
#if !defined(_WIN32)
TEST_CASE("files past the page cache, on a ring and on a thread pool") {
  const PatternFiles files{4096};
  conforms_decorated([&] { return bs::UringStorage{files.map}; }, files.images);
  conforms_decorated(
      [&] {
        return bs::FileStorage{files.map, {2, bs::FileAccess::direct}};
      },
      files.images);
}
#endif
TEST_CASE("a plain reader on a pool, at any alignment and at a drive's") {
  conforms_decorated(
      [] {
        return bs::Pooled{PatternReader{pattern_images()}, 2};
      },
      pattern_images());
  const Images coarse{pattern_bytes(0, 0, 512 * 9), {}, pattern_bytes(2, 0, 512)};
  conforms_decorated([&] { return bs::Pooled{PatternReader{coarse, 512}, 2}; }, coarse);
}
TEST_CASE("a drive in virtual time") {
  const Images images = pattern_images();
  std::vector<bs::BlockImage> table;
  for (const Bytes& image : images) table.push_back(plain_image(image.size()));
  bs::VirtualClock clock;
  bs::DriveModel drive;
  drive.cost = {1'000'000'000, std::chrono::microseconds{10}};
  drive.delay = [](std::uint64_t n) { return bs::Nanoseconds{n * 7919 % 30'000}; };
  bs::testing::TierSuiteOptions options;
  options.progress = [&] { return clock.run_one(); };
  const auto fill = [&](bs::BlockId block, bs::ByteRange range, std::span<std::byte> out) {
    std::ranges::copy(std::span{images[bs::index_of(block)]}.subspan(range.offset, out.size()),
                      out.begin());
  };
  conforms(bs::SimulatedStorage{clock, table, drive, fill}, images, options);
  CHECK(clock.pending() == 0);
}
