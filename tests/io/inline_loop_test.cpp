// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/io/inline_loop.hpp>

#include <support/catch.hpp>

#include <vector>

namespace bs = block_streamer;

namespace {

struct Log {
  std::vector<int> order;
};
struct LoggedStep {
  Log* log;
  int value;
  static void run(void* self) noexcept {
    auto* step = static_cast<LoggedStep*>(self);
    step->log->order.push_back(step->value);
  }
};
bool has_three(void* log) {
  return static_cast<Log*>(log)->order.size() >= 3;
}

}  // namespace

TEST_CASE("a waiting caller runs the tasks itself and stops as soon as the condition holds") {
  Log log;
  std::vector<LoggedStep> steps{{&log, 0}, {&log, 1}, {&log, 2}, {&log, 3}};
  bs::InlineLoop loop;
  for (LoggedStep& step : steps) loop.post(&LoggedStep::run, &step);
  loop.wait_until(&has_three, &log);
  CHECK(log.order == std::vector{0, 1, 2});
  CHECK(loop.queued() == 1);
  CHECK(loop.run_all() == 1);
}

TEST_CASE("a test can choose the order") {
  Log log;
  std::vector<LoggedStep> steps{{&log, 0}, {&log, 1}, {&log, 2}};
  bs::InlineLoop loop{[](std::size_t queued) { return queued - 1; }};
  for (LoggedStep& step : steps) loop.post(&LoggedStep::run, &step);
  loop.wait_until(&has_three, &log);
  CHECK(log.order == std::vector{2, 1, 0});
}

TEST_CASE("waiting for what cannot come is an exception, not a hang") {
  Log log;
  bs::InlineLoop loop;
  CHECK_THROWS_AS(loop.wait_until(&has_three, &log), bs::ContractViolation);
}

TEST_CASE("an idle hook makes things happen until it cannot") {
  Log log;
  LoggedStep step{&log, 9};
  int left = 3;
  bs::InlineLoop* self = nullptr;
  bs::InlineLoop loop{{}, [&] {
                        if (left-- == 0) return false;
                        self->post(&LoggedStep::run, &step);
                        return true;
                      }};
  self = &loop;
  loop.wait_until(&has_three, &log);
  CHECK(log.order == std::vector{9, 9, 9});
  CHECK_THROWS_AS(loop.wait_until([](void*) { return false; }, nullptr), bs::ContractViolation);
}
