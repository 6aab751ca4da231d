// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/trace/residency_history.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {
bs::Transition numbered(std::uint64_t n) {
  return {n,
          {bs::block_at(n % 64), 0},
          bs::Residency::empty,
          bs::Residency::fetching,
          static_cast<std::uint32_t>(n % 3),
          n / 64};
}
}  // namespace

TEST_CASE("the history keeps everything until it is full, then the newest, oldest first") {
  bs::ResidencyHistory history;
  CHECK(history.size() == 0);
  CHECK_THROWS_AS(history[0], bs::ContractViolation);

  history.observe(numbered(0));
  history.observe(numbered(1));
  REQUIRE(history.size() == 2);
  CHECK(history[1] == numbered(1));

  const std::uint64_t total = bs::ResidencyHistory::capacity + 37;
  for (std::uint64_t n = 2; n < total; ++n) history.observe(numbered(n));
  REQUIRE(history.size() == bs::ResidencyHistory::capacity);
  CHECK(history.recorded() == total);
  const auto kept = history.transitions();
  for (std::size_t i = 0; i < kept.size(); ++i) REQUIRE(kept[i] == numbered(37 + i));
  CHECK_THROWS_AS(history[bs::ResidencyHistory::capacity], bs::ContractViolation);
}

TEST_CASE("an observer reference passes transitions on and an empty one ignores them") {
  bs::ResidencyHistory history;
  bs::ResidencyObserverRef nobody;
  nobody.observe(numbered(5));
  CHECK_FALSE(nobody);

  bs::ResidencyObserverRef observer = history;
  REQUIRE(observer);
  observer.observe(numbered(6));
  REQUIRE(history.size() == 1);
  CHECK(history[0] == numbered(6));
}

TEST_CASE("every state has a name of its own") {
  CHECK(bs::name_of(bs::Residency::empty) == "empty");
  CHECK(bs::name_of(bs::Residency::fetching) == "fetching");
  CHECK(bs::name_of(bs::Residency::resident) == "resident");
  CHECK(bs::name_of(bs::Residency::leased) == "leased");
  CHECK(bs::name_of(bs::Residency::released) == "released");
}
