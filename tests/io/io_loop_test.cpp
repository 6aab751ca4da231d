// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/io/io_loop.hpp>

#include <support/catch.hpp>

#include <atomic>
#include <thread>
#include <vector>

namespace bs = block_streamer;

namespace {

/// Appends to `order`, which only the loop's thread touches.
struct Step {
  std::vector<int>* order;
  int value;
  static void run(void* self) noexcept {
    auto* step = static_cast<Step*>(self);
    step->order->push_back(step->value);
  }
};

}  // namespace

TEST_CASE("tasks run on one thread, in the order of their posts") {
  std::vector<int> order;
  std::vector<Step> steps;
  for (int i = 0; i < 1000; ++i) steps.push_back({&order, i});
  {
    bs::IoLoop loop;
    for (Step& step : steps) loop.post(&Step::run, &step);
  }  // the destructor drains
  REQUIRE(order.size() == 1000);
  for (int i = 0; i < 1000; ++i) REQUIRE(order[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("tasks posted by tasks while the loop is being destroyed still run") {
  struct Chain {
    bs::IoLoop* loop;
    int left = 100;
    static void run(void* self) noexcept {
      auto* chain = static_cast<Chain*>(self);
      if (--chain->left > 0) chain->loop->post(&Chain::run, chain);
    }
  };
  Chain chain{};
  {
    bs::IoLoop loop;
    chain.loop = &loop;
    loop.post(&Chain::run, &chain);
  }
  CHECK(chain.left == 0);
}

TEST_CASE("waiting returns at once where the condition already holds, without any task") {
  bs::IoLoop loop;
  loop.wait_until([](void*) { return true; }, nullptr);
}

TEST_CASE("waiting sees the effect of every task, however the threads interleave") {
  bs::IoLoop loop;
  std::atomic<int> count{0};
  for (int round = 1; round <= 2000; ++round) {
    loop.post([](void* c) noexcept { ++*static_cast<std::atomic<int>*>(c); }, &count);
    struct Wait {
      std::atomic<int>* count;
      int target;
    } wait{&count, round};
    loop.wait_until(
        [](void* w) {
          auto* wanted = static_cast<Wait*>(w);
          return *wanted->count >= wanted->target;
        },
        &wait);
    REQUIRE(count == round);
  }
}

TEST_CASE("the condition is asked again after work of the executor as well") {
  bs::IoLoop loop;
  std::atomic<bool> ran{false};
  boost::asio::post(loop.executor(), [&ran] { ran = true; });
  loop.wait_until([](void* flag) { return static_cast<std::atomic<bool>*>(flag)->load(); }, &ran);
  CHECK(ran);
}

TEST_CASE("a loop that would wait for itself is told so") {
  bs::IoLoop loop;
  struct Probe {
    bs::IoLoop* loop;
    std::atomic<int> caught{-1};
  } probe{&loop};
  loop.post(
      [](void* p) noexcept {
        auto* self = static_cast<Probe*>(p);
        try {
          self->loop->wait_until([](void*) { return false; }, nullptr);
          self->caught = 0;
        } catch (const bs::ContractViolation&) {
          self->caught = 1;
        }
      },
      &probe);
  loop.wait_until([](void* p) { return static_cast<Probe*>(p)->caught.load() >= 0; }, &probe);
  CHECK(probe.caught == 1);
}

TEST_CASE("posts from many threads all run") {
  std::atomic<int> count{0};
  {
    bs::IoLoop loop;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 250; ++i) {
          loop.post([](void* c) noexcept { ++*static_cast<std::atomic<int>*>(c); }, &count);
        }
      });
    }
    for (auto& t : threads) t.join();
  }
  CHECK(count == 1000);
}
