// SPDX-License-Identifier: Apache-2.0
// Attempts to break the pipeline: each case states what should hold and fails, hangs or crashes
// where it does not. Run a case at a time under `timeout`.
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/pipeline/pass.hpp>

#include <support/catch.hpp>

#include <atomic>
#include <thread>

#include "pipeline_run.hpp"

namespace bs = block_streamer;
using bs::HostBackend;
using bs::HostMode;
using support::plain_images;
using support::small_options;

namespace {

/// A host backend that fails, or does something, on demand.
struct Hooks {
  std::atomic<int> record_fails_in{-1};  ///< 0: the next record throws, once
  std::atomic<int> copy_fails_in{-1};
  std::atomic<bool> notify_fails{false};
  std::function<void()> at_record;
};
struct HookBackend : HostBackend {
  HookBackend(HostMode mode, Hooks& h) : HostBackend{mode}, hooks{&h} {}
  void record(Event& event, Stream& stream) {
    if (hooks->record_fails_in.load() >= 0 && hooks->record_fails_in-- == 0)
      throw bs::DeviceError{"record failed once", 1};
    if (hooks->at_record) std::exchange(hooks->at_record, {})();
    HostBackend::record(event, stream);
  }
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from, bs::CopyDirection d,
                  Stream& stream) {
    if (hooks->notify_fails) return;  // the device failed: the bytes never arrive
    if (hooks->copy_fails_in.load() >= 0 && hooks->copy_fails_in-- == 0)
      throw bs::DeviceError{"copy failed once", 1};
    HostBackend::copy_async(to, from, d, stream);
  }
  void notify(Event& event, bs::IoCompletion reached) {
    if (!hooks->notify_fails) return HostBackend::notify(event, std::move(reached));
    reached(std::make_error_code(std::errc::io_error), 0);
  }
  Hooks* hooks;
};
static_assert(bs::execution_backend<HookBackend>);

}  // namespace

TEST_CASE("t1 a pass over a RAM tier given up before its first visit leaves nothing to wait for") {
  const auto images = plain_images(6, 512);
  auto options = small_options(1);
  options.device_budget = 2 * 512;  // 4 slots
  HostBackend backend;
  auto compute = backend.make_stream();
  bs::BlockPipeline<HostBackend> pipeline{support::MemoryTier{images}, backend, options};
  REQUIRE(pipeline.slot_count() == 4);
  const auto order = [](std::initializer_list<std::size_t> blocks) {
    bs::VisitOrder o;
    for (const std::size_t b : blocks) o.push_back({bs::block_at(b)});
    return o;
  };
  CHECK(support::run_pass(pipeline, images, order({0, 1, 2, 3}), {}, compute) == 0);
  { auto pass = pipeline.begin_pass(order({0, 1, 4, 5}), order({1, 3, 2, 0}), compute); }
  pipeline.drain();  // hangs: a fetch is grantable, and nobody pumps a RAM tier
  SUCCEED();
}

TEST_CASE("t2 after close() a later failure reports its own cause") {
  const auto images = plain_images(4, 3000);
  support::ReadScript script;
  std::atomic<int> mode{0};
  script.outcome = [&](std::size_t) {
    if (mode == 1) return std::make_error_code(std::errc::permission_denied);
    if (mode == 2) return std::make_error_code(std::errc::no_space_on_device);
    return std::error_code{};
  };
  HostBackend backend;
  auto compute = backend.make_stream();
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  const auto order = bs::ascending(0, 4);
  CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
  {
    auto pass = pipeline.begin_pass(order, order, compute);
    for (int i = 0; i < 2; ++i) (void)pass.acquire();
    pipeline.drain();
    mode = 1;  // what fails is the prefetch for the next pass
    (void)pass.acquire();
  }
  pipeline.drain();
  pipeline.close();
  mode = 2;
  std::string message;
  try {
    support::run_pass(pipeline, images, order, order, compute);
  } catch (const bs::StorageError& error) {
    message = error.what();
  }
  CHECK_THAT(message, ContainsSubstring("No space left"));
  CHECK_THAT(message, !ContainsSubstring("Permission"));
}

TEST_CASE("t3 a prefetch that fails while the next pass begins, with reads still in flight") {
  for (const auto host : {HostMode::attached, HostMode::detached}) {
    const auto images = plain_images(4, 3000);  // 3 chunks each
    support::ReadScript script;
    Hooks hooks;
    HookBackend backend{host, hooks};
    auto compute = backend.make_stream();
    std::atomic<bool> fail{false};
    script.outcome = [&](std::size_t) {
      return fail ? std::make_error_code(std::errc::io_error) : std::error_code{};
    };
    bs::BlockPipeline<HookBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                            small_options(1)};
    const auto order = bs::ascending(0, 4);
    CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
    {
      auto pass = pipeline.begin_pass(order, order, compute);
      for (int i = 0; i < 2; ++i) (void)pass.acquire();
      pipeline.drain();
      {
        const std::scoped_lock lock{script.mutex};
        script.hold = true;  // the reads of the tail prefetch hang
      }
      for (int i = 0; i < 2; ++i) (void)pass.acquire();
    }
    for (;;) {  // until they are all in flight
      const std::scoped_lock lock{script.mutex};
      if (script.held.size() >= 3) break;
    }
    std::thread later;
    hooks.at_record = [&] {  // inside begin_pass, after its look at the failure
      fail = true;
      script.release(0);
      fail = false;
      {
        const std::scoped_lock lock{script.mutex};
        script.hold = false;
      }
      later = std::thread{[&] {
        while (script.release(0)) {
        }
      }};
    };
    CHECK_THROWS_AS(support::run_pass(pipeline, images, order, order, compute), bs::StorageError);
    later.join();
    pipeline.drain();
    CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
  }
}

TEST_CASE("t4 a prefetch that fails before the next pass begins is told once, by that pass") {
  const auto images = plain_images(4, 900);
  support::ReadScript script;
  std::atomic<bool> fail{false};
  script.outcome = [&](std::size_t) {
    return fail ? std::make_error_code(std::errc::io_error) : std::error_code{};
  };
  HostBackend backend;
  auto compute = backend.make_stream();
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  const auto order = bs::ascending(0, 4);
  CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
  {
    auto pass = pipeline.begin_pass(order, order, compute);
    for (int i = 0; i < 2; ++i) (void)pass.acquire();
    pipeline.drain();
    {
      const std::scoped_lock lock{script.mutex};
      script.hold = true;
    }
    for (int i = 0; i < 2; ++i) (void)pass.acquire();
  }
  std::atomic<bool> failed{false};
  std::thread other{[&] {
    fail = true;
    while (!script.release(0)) {  // until the prefetch is in flight
    }
    fail = false;
    {
      const std::scoped_lock lock{script.mutex};
      script.hold = false;
    }
    failed.store(true, std::memory_order_relaxed);
  }};
  while (!failed.load(std::memory_order_relaxed)) {  // relaxed: TSan sees no order that is not ours
  }
  CHECK_THROWS_AS(support::run_pass(pipeline, images, order, order, compute), bs::StorageError);
  other.join();
  CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
}

TEST_CASE("t5 a device failure that only the notification reports is not computed with") {
  const auto images = plain_images(4, 3000);
  support::ReadScript script;
  Hooks hooks;
  HookBackend backend{HostMode::detached, hooks};
  auto compute = backend.make_stream();
  bs::BlockPipeline<HookBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(0)};
  hooks.notify_fails = true;
  const auto order = bs::ascending(0, 4);
  std::size_t wrong = 0;
  CHECK_THROWS_AS(wrong = support::run_pass(pipeline, images, order, {}, compute), bs::Error);
  CHECK(wrong == 0);
}

TEST_CASE("t6 a release that the device refuses once is reported, and the next pass works") {
  const auto images = plain_images(4, 3000);
  support::ReadScript script;
  Hooks hooks;
  HookBackend backend{HostMode::attached, hooks};
  auto compute = backend.make_stream();
  bs::BlockPipeline<HookBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  const auto order = bs::ascending(0, 4);
  {
    auto pass = pipeline.begin_pass(order, order, compute);
    auto lease = pass.acquire();
    hooks.record_fails_in = 0;
  }
  CHECK(hooks.record_fails_in == -1);
  CHECK_THROWS_AS(pipeline.begin_pass(order, order, compute), bs::DeviceError);
  CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
}

TEST_CASE("t7 a pass is over once a block of it was discarded") {
  const auto images = plain_images(3, 512);
  support::ReadScript script;
  HostBackend backend;
  auto compute = backend.make_stream();
  auto options = small_options(1);
  options.device_budget = 512;
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend, options};
  const auto order = bs::joined(bs::ascending(0, 2), bs::ascending(0, 2));
  auto pass = pipeline.begin_pass(order, {}, compute);
  pass.acquire().discard();
  CHECK(pass.done());
  CHECK_THROWS_AS(pass.acquire(), bs::ContractViolation);
}

TEST_CASE("t8 the largest chunk size means one read a block") {
  auto images = plain_images(2, 3000);
  images[1].segments = {{10, 0, 1000}, {1020, 1024, 1000}};
  images[1].part_begin = {0, 2};
  images[1].layout.slot_byte_count = {2024};
  for (const auto host : {HostMode::attached, HostMode::detached}) {
    for (const std::uint64_t chunk :
         {std::numeric_limits<std::uint64_t>::max(), std::uint64_t{1} << 63}) {
      support::ReadScript script;
      HostBackend backend{host};
      auto compute = backend.make_stream();
      auto options = small_options(1);
      options.chunk_byte_count = chunk;
      bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                              options};  // never returns
      CHECK(support::run_pass(pipeline, images, bs::ascending(0, 2), {}, compute) == 0);
    }
  }
}

TEST_CASE("t9 a first pass that the device refuses once does not spoil the pipeline") {
  const auto images = plain_images(4, 3000);
  support::ReadScript script;
  Hooks hooks;
  HookBackend backend{HostMode::attached, hooks};
  auto compute = backend.make_stream();
  bs::BlockPipeline<HookBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  const auto order = bs::ascending(0, 4);
  hooks.record_fails_in = 0;
  CHECK_THROWS_AS(support::run_pass(pipeline, images, order, order, compute), bs::DeviceError);
  CHECK_NOTHROW(support::run_pass(pipeline, images, order, order, compute));
  CHECK_NOTHROW(pipeline.drain());
  CHECK_NOTHROW(pipeline.close());
  CHECK_NOTHROW(support::run_pass(pipeline, images, order, order, compute));
}

TEST_CASE("t10 a part that does not exist is refused") {
  const auto images = plain_images(4, 3000);
  support::ReadScript script;
  HostBackend backend;
  auto compute = backend.make_stream();
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  CHECK_THROWS_AS(support::run_pass(pipeline, images, bs::ascending(4, 6), {}, compute),
                  bs::ContractViolation);
}

TEST_CASE("t11 a copy that fails half-way while earlier pieces are on the device") {
  auto images = plain_images(4, 3000);
  support::ReadScript script;
  Hooks hooks;
  HookBackend backend{HostMode::detached, hooks};
  auto compute = backend.make_stream();
  bs::BlockPipeline<HookBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  const auto order = bs::ascending(0, 4);
  for (int n = 0; n < 14; ++n) {
    hooks.copy_fails_in = n;
    std::size_t wrong = 0;
    int told = 0;
    for (int pass = 0; pass < 2; ++pass) {  // the copy may be a prefetch of the second
      try {
        wrong += support::run_pass(pipeline, images, order, order, compute);
      } catch (const bs::DeviceError&) {
        ++told;
      }
      pipeline.drain();
    }
    CHECK(wrong == 0);
    const bool failed = hooks.copy_fails_in.exchange(-1) < 0;
    try {
      CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
    } catch (const bs::DeviceError&) {
      ++told;
      CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
    }
    CHECK(told == (failed ? 1 : 0));
  }
}

TEST_CASE("t12 staging stays within its option") {
  const auto images = plain_images(2, 5 << 20);
  support::ReadScript script;
  HostBackend backend{HostMode::detached};
  auto compute = backend.make_stream();
  auto options = small_options(1);
  options.chunk_byte_count = 4 << 20;
  options.staging_byte_count = 1 << 20;
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend, options};
  CHECK(support::run_pass(pipeline, images, bs::ascending(0, 2), {}, compute) == 0);
  CHECK(pipeline.staging_byte_count() <= options.staging_byte_count);
}

TEST_CASE("t13 drain works inside the first pass as it does inside the second") {
  const auto images = plain_images(4, 3000);
  support::ReadScript script;
  HostBackend backend;
  auto compute = backend.make_stream();
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                          small_options(1)};
  auto pass = pipeline.begin_pass(bs::ascending(0, 4), {}, compute);
  (void)pass.acquire();
  CHECK_NOTHROW(pipeline.drain());
}

TEST_CASE("t14 a chunk whose copy failed half-way is refilled only after its earlier pieces") {
  auto images = plain_images(2, 800);
  for (auto& image : images) {  // four pieces in one chunk
    image.segments = {{0, 0, 200}, {200, 256, 200}, {400, 512, 200}, {600, 768, 200}};
    image.part_begin = {0, 4};
    image.layout.slot_byte_count = {968};
    image.layout.tensors.clear();
    for (const bs::Segment& segment : image.segments)
      image.layout.tensors.push_back(
          {{"t", bs::DType::u8, {200}}, 0, segment.slot_offset, segment.byte_count});
  }
  for (int n = 1; n < 8; ++n) {
    support::ReadScript script;
    Hooks hooks;
    bs::CheckedBackend<HookBackend> backend{HookBackend{HostMode::detached, hooks}};
    const bs::ViolationLog log = backend.log();
    auto compute = backend.make_stream();
    auto options = small_options(0);
    options.staging_byte_count = 2000;
    bs::BlockPipeline<bs::CheckedBackend<HookBackend>> pipeline{
        support::ScriptedTier{images, script}, backend, options};
    const auto order = bs::ascending(0, 2);
    hooks.copy_fails_in = n;
    CHECK_THROWS_AS(support::run_pass(pipeline, images, order, {}, compute), bs::DeviceError);
    CHECK(support::run_pass(pipeline, images, order, {}, compute) == 0);
    CHECK(log.count() == 0);
  }
}
