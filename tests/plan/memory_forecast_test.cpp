// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/plan/memory_forecast.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {
/// 10 tokens of a layer with C = 8, I = 20, 12 query and 4 key elements, in fp32.
bs::DecoderWork some_work() {
  bs::DecoderWork work;
  work.widths = {8, 20, 12, 4, false};
  work.vocabulary = 100;
  work.tokens = 10;
  work.scored = 9;
  work.head_rows = 6;
  return work;
}
}  // namespace

TEST_CASE("a visit without a backward takes three hidden and four inner tensors") {
  bs::DecoderWork work = some_work();
  CHECK(bs::visit_byte_count(work) == 10 * (3 * 8 * 4 + 20 * 16));
  work.item = 2;
  CHECK(bs::visit_byte_count(work) == 10 * (3 * 8 * 2 + 20 * 8));
  work.adapters = true;  // three in 2 bytes, one in 4
  CHECK(bs::visit_byte_count(work) == 10 * (3 * 8 * 2 + 20 * 10));
}

TEST_CASE("a visit with a backward takes the graph of a layer") {
  bs::DecoderWork work = some_work();
  work.kept_inputs = 3;
  const std::uint64_t outer = 4 * 8 + 2 * 12 + 2 * 4;
  CHECK(bs::visit_byte_count(work) == 10 * (outer * 4 + 20 * 24));
  work.adapters = true;  // as much: 5 · 4 + 4
  CHECK(bs::visit_byte_count(work) == 10 * (outer * 4 + 20 * 24));
  work.dropout = true;
  CHECK(bs::visit_byte_count(work) == 10 * (outer * 4 + 20 * 28 + 5 * 8 + 12 + 20));
  work.dropout = false;
  work.item = 2;  // 5 · 2, and 4 for the term and for the cast
  CHECK(bs::visit_byte_count(work) == 10 * (outer * 2 + 20 * 18));
  work.widths.normed_heads = true;
  CHECK(bs::visit_byte_count(work) == 10 * ((outer + 12 + 4) * 2 + 20 * 18));
}

TEST_CASE("the head takes a chunk's logits in fp32, and copies in a half type") {
  bs::DecoderWork work = some_work();
  work.kept_inputs = 3;
  CHECK(bs::head_byte_count(work) == 6 * (100 * 4 + 8 * (12 + 8)));
  work.head_rows = 1000;  // more than there are
  CHECK(bs::head_byte_count(work) == 9 * (100 * 4 + 8 * (12 + 8)));
  work.item = 2;
  CHECK(bs::head_byte_count(work) == 9 * (100 * (4 + 4) + 8 * (6 + 8)));
  work.kept_inputs = 0;
  CHECK(bs::head_byte_count(work) == 9 * (100 * (4 + 2) + 8 * (6 + 8)));
  work.head_slice_rows = 40;
  CHECK(bs::head_byte_count(work) == 9 * (100 * (4 + 2) + 40 * 2 + 8 * (6 + 8)));
}

TEST_CASE("inputs of blocks wait on the device, or all but two of a pass elsewhere") {
  bs::DecoderWork work = some_work();
  work.kept_inputs = 3;
  work.passes = 4;
  const std::uint64_t pass = 10 * 8 * 4;
  bs::MemoryForecast here, elsewhere;
  bs::add_work(here, work, /*offloaded=*/false);
  CHECK(here.inputs == 3 * 4 * pass);
  CHECK(here.parked_inputs == 0);
  CHECK(here.flow == 13 * pass);
  bs::add_work(elsewhere, work, /*offloaded=*/true);
  CHECK(elsewhere.inputs == 2 * pass);
  CHECK(elsewhere.parked_inputs == 3 * 4 * pass);
}

TEST_CASE(
    "the device's peak has the larger of visit and head, the host's the device if it is one") {
  bs::MemoryForecast f;
  f.resident = 1, f.slots = 20, f.trained = 300, f.inputs = 4000, f.flow = 50'000, f.cache = 7;
  f.visit = 600'000, f.head = 500'000;
  CHECK(f.device() == 654'328);
  f.head = 700'000;
  CHECK(f.device() == 754'328);
  f.staging = 3, f.locked_blocks = 60, f.parked_inputs = 900;
  CHECK(f.page_locked() == 963);
  f.program = 10'000, f.blocks = 60;
  CHECK(f.host(false) == 10'963);
  CHECK(f.host(true) == 10'963 + 754'328);
}
