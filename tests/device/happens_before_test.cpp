// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/device/access_history.hpp>
#include <block_streamer/device/happens_before.hpp>

#include <support/catch.hpp>

#include <array>
#include <map>
#include <random>

namespace bs = block_streamer;
using bs::Access;
using bs::AddressRange;

namespace {
/// Actors, and their accesses to made-up addresses.
struct World {
  bs::HappensBefore order;
  bs::AccessHistory history;
  std::vector<bs::Race> access(bs::ActorId actor, AddressRange range, Access kind) {
    return history.access({actor, order.time(actor), "test"}, order.clock(actor), range, kind);
  }
};
}  // namespace

TEST_CASE("an edge orders what came before the release and nothing after it") {
  World w;
  const auto a = w.order.add_actor("a");
  const auto b = w.order.add_actor("b");
  CHECK(w.access(a, {0, 10}, Access::write).empty());
  const auto published = w.order.release(a);
  CHECK(w.access(a, {10, 20}, Access::write).empty());
  CHECK(w.access(b, {0, 5}, Access::read).size() == 1);
  w.order.acquire(b, published);
  CHECK(w.access(b, {0, 10}, Access::read).empty());
  CHECK(w.access(b, {15, 16}, Access::read).size() == 1);
}

TEST_CASE("edges are transitive, and an actor is ordered by itself") {
  World w;
  const auto a = w.order.add_actor("a");
  const auto b = w.order.add_actor("b");
  const auto c = w.order.add_actor("c");
  (void)w.access(a, {0, 8}, Access::write);
  CHECK(w.access(a, {0, 8}, Access::write).empty());
  w.order.edge(a, b);
  w.order.edge(b, c);
  CHECK(w.access(c, {0, 8}, Access::write).empty());
  CHECK(w.access(a, {0, 8}, Access::read).size() == 1);
}

TEST_CASE("reads do not conflict, but each of them does with a write") {
  World w;
  const auto a = w.order.add_actor("a");
  const auto b = w.order.add_actor("b");
  const auto c = w.order.add_actor("c");
  CHECK(w.access(a, {0, 100}, Access::read).empty());
  CHECK(w.access(b, {50, 150}, Access::read).empty());
  const auto races = w.access(c, {40, 120}, Access::write);
  REQUIRE(races.size() == 2);
  for (const auto& race : races) {
    CHECK(race.range.begin == (race.earlier.actor == a ? 40 : 50));
    CHECK(race.range.end == (race.earlier.actor == a ? 100 : 120));
  }
  CHECK(w.access(a, {0, 40}, Access::write).empty());
  w.order.edge(b, a);
  CHECK(w.access(a, {120, 150}, Access::write).empty());
}

TEST_CASE("memory of accesses is forgotten by range only") {
  World w;
  const auto a = w.order.add_actor("a");
  const auto b = w.order.add_actor("b");
  (void)w.access(a, {0, 100}, Access::write);
  w.history.forget({20, 30});
  CHECK(w.access(b, {20, 30}, Access::write).empty());
  CHECK(w.access(b, {19, 20}, Access::write).size() == 1);
  CHECK(w.access(b, {30, 31}, Access::write).size() == 1);
}

TEST_CASE("the history does not grow with the number of accesses") {
  World w;
  const auto a = w.order.add_actor("a");
  std::mt19937 random{1};
  for (int i = 0; i < 5000; ++i) {
    const std::uintptr_t begin = random() % 1000;
    (void)w.access(a, {begin, begin + 1 + random() % 50},
                   random() % 2 == 0 ? Access::read : Access::write);
    (void)w.order.release(a);
    REQUIRE(w.history.cell_count() <= 1050);
  }
  (void)w.access(a, {0, 1050}, Access::write);
  CHECK(w.history.cell_count() == 1);
  for (std::uintptr_t at = 0; at < 1050; at += 50) (void)w.access(a, {at, at + 50}, Access::read);
  CHECK(w.history.cell_count() == 1);
}

TEST_CASE("intervals agree with a record of every single byte") {
  struct Byte {
    std::optional<bs::AccessStamp> write;
    std::map<bs::ActorId, bs::AccessStamp> reads;
  };
  World w;
  std::array<Byte, 64> bytes;
  std::array<bs::ActorId, 4> actors{};
  for (auto& actor : actors) actor = w.order.add_actor("actor");
  std::mt19937 random{7};
  int seen = 0;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 3 == 0) w.order.edge(actors[random() % 4], actors[random() % 4]);
    const auto actor = actors[random() % 4];
    const auto& clock = w.order.clock(actor);
    const std::uintptr_t begin = random() % 60;
    const AddressRange range{begin, begin + random() % (65 - begin)};
    const auto kind = random() % 2 == 0 ? Access::read : Access::write;
    const bs::AccessStamp stamp{actor, w.order.time(actor), "test"};
    bool expected = false;
    for (std::uintptr_t at = range.begin; at < range.end; ++at) {
      Byte& byte = bytes[at];
      if (byte.write && clock[byte.write->actor] < byte.write->time) expected = true;
      for (const auto& [who, read] : byte.reads) {
        if (kind == Access::write && clock[who] < read.time) expected = true;
      }
      if (kind == Access::write) {
        byte = {stamp, {}};
      } else {
        byte.reads[actor] = stamp;
      }
    }
    REQUIRE(w.history.access(stamp, clock, range, kind).empty() == !expected);
    if (expected) ++seen;
  }
  CHECK(seen > 1000);
  CHECK(seen < 19000);
}
