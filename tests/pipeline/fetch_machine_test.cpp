// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/plan/visit_order.hpp>

#include <support/catch.hpp>

#include <deque>
#include <map>
#include <random>

#include "scripted_tier.hpp"

namespace bs = block_streamer;

namespace {

/// Plays the world around a machine: reads and copies end in any order, the visitor goes on
/// whenever its part is there. Checks at every step that the machine keeps its promises.
class World {
 public:
  World(bs::FetchMode mode, std::uint32_t ahead, std::uint32_t slots, std::uint32_t tickets,
        unsigned seed)
      : ahead_{ahead},
        random_{seed},
        machine_{mode, slots, tickets, count_},
        mode_{mode},

        tickets_{tickets} {
    for (const auto& image : support::odd_images(7, 1, seed)) {
      if (mode == bs::FetchMode::staged && seed % 2 == 1 && plans_.size() % 2 == 1) {
        plans_.push_back(bs::plan_memory_copies(image, 0));  // every second one in every second run
        continue;
      }
      plans_.push_back(mode == bs::FetchMode::staged ? bs::plan_staged_reads(image, 0, 700)
                                                     : bs::plan_direct_reads(image, 0, 700));
    }
  }

  /// One pass; at event number `fail_at` something fails. Returns false if the pass did not
  /// complete.
  bool pass(const bs::VisitOrder& order, const bs::VisitOrder& hint, int fail_at = -1,
            std::size_t stop_at = ~std::size_t{0}) {
    const auto plan = bs::plan_pass(order, hint, machine_.expected(), {.prefetch_ahead = ahead_});
    machine_.begin_pass(plan, [this](bs::PartId p) -> const bs::ReadPlan& {
      return plans_[bs::index_of(p.block)];
    });
    std::size_t visit = 0;
    bool ok = true;
    for (int event = 0; visit < plan.visits.size() && visit < stop_at; ++event) {
      if (event == fail_at) machine_.fail();
      if (machine_.failed()) {
        ok = false;
        break;
      }
      if (random_() % 3 != 0) pump();  // the loop may lag behind the visitor
      if (leased_) {
        leased_ = false;
        machine_.release(plan.visits[visit++]);
      } else if (machine_.usable(plan.visits[visit])) {
        const bs::PlannedVisit& now = plan.visits[visit];
        const bool empty = plans_[bs::index_of(now.part.block)].chunks.empty();
        REQUIRE((empty || content_[now.slot] == now.part));
        machine_.lease(plan.visits[visit]);
        leased_ = true;
      } else {
        pump();
        if (machine_.usable(plan.visits[visit])) continue;
        REQUIRE(end_something());  // else nobody can go on: a deadlock
      }
    }
    if (leased_) {
      leased_ = false;
      machine_.release(plan.visits[visit]);
    }
    machine_.end_pass();
    return ok;
  }
  void settle() {
    do pump();
    while (end_something());
    REQUIRE(machine_.quiet());
    next_chunk_.clear();
    if (machine_.failed()) machine_.reset_failure();
  }
  bs::FetchMachine<>& machine() { return machine_; }
  const support::ResidencyCount& count() const { return count_; }

 private:
  struct InFlight {
    bool copy;
    bs::FetchAction action;
  };
  void pump() {
    while (auto action = machine_.next()) {
      if (action->kind == bs::FetchAction::Kind::copy_all) {
        content_[action->slot] = action->part;
        if (mode_ == bs::FetchMode::addressed) {
          machine_.copied_all(action->slot);
        } else {
          machine_.copied(action->ticket);
          machine_.drained(action->ticket);
        }
        continue;
      }
      if (action->kind == bs::FetchAction::Kind::read) {
        in_flight_.push_back({false, *action});
        REQUIRE(in_flight_.size() <= tickets_);
        continue;
      }
      // copies come in plan order: the chunks of a part in sequence
      CHECK(action->chunk == next_chunk_[action->part]);
      next_chunk_[action->part] = action->last ? 0 : action->chunk + 1;
      if (action->last) content_[action->slot] = action->part;
      machine_.copied(action->ticket);
      in_flight_.push_back({true, *action});
      REQUIRE(in_flight_.size() <= tickets_);
    }
  }
  bool end_something() {
    if (in_flight_.empty()) return false;
    const auto at = in_flight_.begin() + static_cast<std::ptrdiff_t>(random_() % in_flight_.size());
    const InFlight ended = *at;
    in_flight_.erase(at);
    if (ended.copy) {
      machine_.drained(ended.action.ticket);
    } else {
      if (mode_ == bs::FetchMode::in_place) content_[ended.action.slot] = ended.action.part;
      machine_.arrived(ended.action.ticket);
    }
    return true;
  }

  std::uint32_t ahead_;
  std::mt19937 random_;
  support::ResidencyCount count_;
  bs::FetchMachine<> machine_;
  bs::FetchMode mode_;
  std::uint32_t tickets_;
  std::vector<bs::ReadPlan> plans_;
  std::deque<InFlight> in_flight_;
  std::map<std::uint32_t, bs::PartId> content_;
  std::map<bs::PartId, std::uint32_t> next_chunk_;
  bool leased_ = false;
};

constexpr bs::FetchMode modes[] = {bs::FetchMode::staged, bs::FetchMode::in_place,
                                   bs::FetchMode::addressed};

}  // namespace

TEST_CASE(
    "passes complete in every order of completions, at any depth, with any number of tickets") {
  unsigned runs = 0;
  for (const auto mode : modes) {
    for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
      for (const std::uint32_t cached : {0U, 2U}) {
        for (const std::uint32_t tickets : {1U, 2U, 5U}) {
          World world{mode, ahead, std::min(7U, ahead + 1 + cached), tickets, ++runs};
          const auto forward = bs::ascending(0, 7), backward = bs::descending(2, 7);
          for (int step = 0; step < 3; ++step) {
            REQUIRE(world.pass(forward, bs::joined(backward, forward)));
            REQUIRE(world.pass(backward, bs::joined(forward, backward)));
          }
          world.settle();
          CHECK(world.count().peak <= ahead + 1 + cached);
          CHECK(world.count().in_order);
        }
      }
    }
  }
}

TEST_CASE("after a failure at any event the machine becomes quiet and is usable") {
  for (const auto mode : modes) {
    for (int fail_at = 0; fail_at < 60; ++fail_at) {
      World world{mode, 2, 4, 3, static_cast<unsigned>(fail_at) + 100};
      const auto order = bs::ascending(0, 7);
      REQUIRE(world.pass(order, order));
      world.pass(order, order, fail_at);
      world.settle();
      REQUIRE(world.pass(order, order));
      world.settle();
    }
  }
}

TEST_CASE(
    "b79 passes given up anywhere, and hints that were wrong, leave nothing that a later pass "
    "trips "
    "over") {
  std::mt19937 random{5};
  for (unsigned seed = 0; seed < 300; ++seed) {
    const std::uint32_t ahead = random() % 4;
    World world{modes[seed % 3], ahead, ahead + 1 + static_cast<std::uint32_t>(random() % 3),
                1 + static_cast<std::uint32_t>(random() % 4), seed};
    for (int pass = 0; pass < 8; ++pass) {
      const auto up = bs::ascending(random() % 3, 7), down = bs::descending(random() % 3, 7);
      world.pass(random() % 2 == 0 ? up : down, random() % 2 == 0 ? up : down, -1, random() % 9);
    }
    world.settle();
    CHECK(world.count().peak <= world.machine().slots.all().size());
  }
}

TEST_CASE("what is granted when a pass is given up completes, the rest is forgotten") {
  const auto image = support::odd_images(3)[0];
  const auto reads = bs::plan_staged_reads(image, 0, 1 << 20);
  bs::FetchMachine<> machine{bs::FetchMode::staged, 2, 2};
  const auto order = bs::ascending(0, 3);
  const auto plan = bs::plan_pass(order, {}, machine.expected(), {.prefetch_ahead = 1});
  machine.begin_pass(plan, [&](bs::PartId) -> const bs::ReadPlan& { return reads; });
  const auto first = machine.next(), second = machine.next();
  REQUIRE((first && second));
  CHECK_FALSE(machine.next());  // the third waits for a release
  machine.end_pass();
  CHECK(machine.expected() ==
        bs::SlotContents{bs::PartId{bs::block_at(0)}, bs::PartId{bs::block_at(1)}});
  machine.arrived(second->ticket);
  CHECK_FALSE(machine.next());  // rule 3: the first chunk has not arrived
  machine.arrived(first->ticket);
  CHECK(machine.next()->part == first->part);
  CHECK(machine.next()->part == second->part);
}

TEST_CASE("rule 3: a part in memory is copied in its turn, after chunks that are not there yet") {
  const auto images = support::odd_images(8);
  const auto reads = bs::plan_staged_reads(images[0], 0, 1 << 20);
  const auto held = bs::plan_memory_copies(images[1], 0);
  REQUIRE((reads.chunks.size() == 1 && held.chunks.size() > 1));
  bs::FetchMachine<> machine{bs::FetchMode::staged, 3, 3};
  const auto order = bs::ascending(0, 3);
  machine.begin_pass(
      bs::plan_pass(order, {}, machine.expected(), {.prefetch_ahead = 2}),
      [&](bs::PartId p) -> const bs::ReadPlan& { return p == order[1] ? held : reads; });
  const auto first = machine.next(), third = machine.next();
  REQUIRE((first && third));
  CHECK(first->part == order[0]);
  CHECK(third->part == order[2]);  // the second is not read
  machine.arrived(third->ticket);
  CHECK_FALSE(machine.next());
  machine.arrived(first->ticket);
  CHECK(machine.next()->part == order[0]);
  const auto second = machine.next();
  CHECK(second->part == order[1]);
  CHECK(second->kind == bs::FetchAction::Kind::copy_all);
  CHECK(machine.next()->part == order[2]);
  CHECK_FALSE(machine.quiet());
  machine.copied(second->ticket);
  CHECK(machine.usable({order[1], second->slot}));
  CHECK(machine.slots.statistics.bytes_read == 2 * reads.read_byte_count);
}

TEST_CASE("a slot makes only the moves its state allows") {
  using R = bs::Residency;
  CHECK(bs::may_follow(R::empty, R::fetching));
  CHECK(bs::may_follow(R::fetching, R::resident));
  CHECK(bs::may_follow(R::released, R::leased));
  CHECK_FALSE(bs::may_follow(R::leased, R::fetching));
  CHECK_FALSE(bs::may_follow(R::leased, R::empty));
  CHECK_FALSE(bs::may_follow(R::empty, R::leased));
  CHECK_FALSE(bs::may_follow(R::fetching, R::leased));
  bs::SlotTable slots{1, {}};
  slots.begin_fetch(0, {bs::block_at(3)}, 10, 1);
  CHECK_THROWS_AS(slots.move(0, R::leased, 1), bs::ContractViolation);
}

TEST_CASE("a pass that begins on a failed machine reads nothing: old reads still fill its slots") {
  const auto image = support::odd_images(2, 1, 3).front();
  const bs::ReadPlan reads = bs::plan_direct_reads(image, 0, 1 << 20);
  REQUIRE(!reads.chunks.empty());
  bs::FetchMachine<> machine{bs::FetchMode::in_place, 2, 64, {}};
  const auto order = bs::ascending(0, 1);
  const auto begin = [&] {
    const auto plan = bs::plan_pass(order, order, machine.expected(), {.prefetch_ahead = 0});
    machine.begin_pass(plan, [&](bs::PartId) -> const bs::ReadPlan& { return reads; });
  };
  begin();
  std::vector<std::uint32_t> in_flight;
  while (const auto action = machine.next()) in_flight.push_back(action->ticket);
  REQUIRE(!in_flight.empty());
  machine.fail();
  begin();
  CHECK_FALSE(machine.next().has_value());
  CHECK_FALSE(machine.quiet());
  for (const std::uint32_t ticket : in_flight) machine.arrived(ticket);
  CHECK(machine.idle());
  machine.reset_failure();
  begin();
  CHECK(machine.next().has_value());
}
