// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/plan/read_plan.hpp>

#include <support/catch.hpp>

#include <random>
#include <vector>

namespace bs = block_streamer;

namespace {

bs::BlockImage image_of(std::vector<bs::Segment> segments, std::uint64_t byte_count,
                        std::uint32_t granularity = 1) {
  bs::BlockImage image;
  image.byte_count = byte_count;
  image.read_granularity = granularity;
  image.part_begin = {0, static_cast<std::uint32_t>(segments.size())};
  image.segments = std::move(segments);
  return image;
}

/// Plays a plan on bytes whose value depends on their image offset and checks every byte of every
/// segment.
void check_reads(const bs::BlockImage& image, const bs::ReadPlan& plan) {
  std::uint64_t slot_size = 0, needed = 0;
  for (const auto& s : image.segments) {
    slot_size = std::max(slot_size, s.slot_offset + s.byte_count);
    needed += s.byte_count;
  }
  constexpr std::uint64_t untouched = ~0ULL;
  std::vector<std::uint64_t> slot(slot_size, untouched);  // which image byte landed here
  std::uint64_t read = 0;
  for (const auto& chunk : plan.chunks) {
    CHECK(chunk.image.offset % image.read_granularity == 0);
    CHECK(
        (chunk.image.end() % image.read_granularity == 0 || chunk.image.end() == image.byte_count));
    REQUIRE(chunk.image.end() <= image.byte_count);
    read += chunk.image.byte_count;
    for (const auto& piece : plan.pieces_of(chunk)) {
      REQUIRE(piece.chunk_offset + piece.byte_count <= chunk.image.byte_count);
      for (std::uint64_t i = 0; i < piece.byte_count; ++i) {
        REQUIRE(slot[piece.slot_offset + i] == untouched);
        slot[piece.slot_offset + i] = chunk.image.offset + piece.chunk_offset + i;
      }
    }
  }
  for (const auto& s : image.segments) {
    for (std::uint64_t i = 0; i < s.byte_count; ++i)
      REQUIRE(slot[s.slot_offset + i] == s.image_offset + i);
  }
  CHECK(plan.read_byte_count == read);
  CHECK(plan.needed_byte_count == needed);
}

}  // namespace

TEST_CASE("staged reads cover every segment exactly once at any chunk size") {
  const auto image = image_of({{3, 0, 10}, {13, 256, 1}, {20, 512, 100}}, 121);
  for (std::uint64_t chunk : {1, 2, 7, 16, 64, 121, 4096}) {
    check_reads(image, bs::plan_staged_reads(image, 0, chunk));
    check_reads(image, bs::plan_direct_reads(image, 0, chunk));
  }
}

TEST_CASE("reads are rounded to the granularity and a wide gap is not read") {
  const auto image = image_of({{8, 0, 100}, {9000, 256, 8}}, 9216, 512);
  const auto plan = bs::plan_staged_reads(image, 0, 512);
  check_reads(image, plan);
  CHECK(plan.read_byte_count == 1024);
}

TEST_CASE("a block without bytes has no read") {
  const auto image = image_of({}, 0);
  CHECK(bs::plan_staged_reads(image, 0, 4096).chunks.empty());
  CHECK(bs::plan_direct_reads(image, 0, 4096).chunks.empty());
}

TEST_CASE("random segment tables") {
  std::mt19937 random{7};
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t granularity = std::vector<std::uint32_t>{1, 4, 16, 64}[random() % 4];
    std::vector<bs::Segment> segments;
    std::uint64_t at = 0, slot = 0;
    for (std::uint32_t n = random() % 8; n-- > 0;) {
      at += random() % 90;
      const std::uint64_t size = 1 + random() % 300;
      segments.push_back({at, slot, size});
      at += size;
      slot = bs::round_up(slot + size, 256);
    }
    const auto image = image_of(segments, bs::round_up(at, granularity), granularity);
    check_reads(image, bs::plan_staged_reads(image, 0, 1 + random() % 200));
    if (granularity == 1) check_reads(image, bs::plan_direct_reads(image, 0, 1 + random() % 200));
  }
}

TEST_CASE("a plan refuses what it cannot do") {
  CHECK_THROWS_AS(bs::plan_staged_reads(image_of({}, 0), 0, 0), bs::ContractViolation);
  CHECK_THROWS_AS(bs::plan_staged_reads(image_of({}, 0), 1, 1), bs::ContractViolation);
  CHECK_THROWS_AS(bs::plan_direct_reads(image_of({}, 0, 512), 0, 1), bs::ContractViolation);
}
