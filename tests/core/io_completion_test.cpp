// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/io_completion.hpp>

#include <support/catch.hpp>

#include <array>
#include <memory>

namespace bs = block_streamer;

TEST_CASE("a completion carries move-only state and is empty after the call") {
  std::size_t got = 0;
  auto owned = std::make_unique<int>(7);
  bs::IoCompletion done{
      [&got, owned = std::move(owned)](std::error_code, std::size_t n) { got = n + *owned; }};
  REQUIRE(done);
  bs::IoCompletion moved = std::move(done);
  CHECK_FALSE(done);
  moved({}, 3);
  CHECK(got == 10);
  CHECK_FALSE(moved);
}

TEST_CASE("a function too large for the buffer is called and destroyed") {
  auto alive = std::make_shared<int>(0);
  std::error_code seen;
  {
    std::array<char, 256> ballast{};
    bs::IoCompletion done{[&seen, alive, ballast](std::error_code e, std::size_t) {
      seen = ballast[0] == 0 ? e : std::error_code{};
    }};
    CHECK(alive.use_count() == 2);
    done(std::make_error_code(std::errc::io_error), 0);
    CHECK(alive.use_count() == 1);
  }
  CHECK(seen == std::errc::io_error);
}

TEST_CASE("the function may destroy the object that holds the completion") {
  auto holder = std::make_unique<bs::IoCompletion>();
  bool called = false;
  *holder = bs::IoCompletion{[&](std::error_code, std::size_t) {
    holder.reset();
    called = true;
  }};
  (*holder)({}, 0);
  CHECK(called);
}
