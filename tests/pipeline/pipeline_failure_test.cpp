// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/pipeline/pass.hpp>

#include <support/catch.hpp>

#include "pipeline_run.hpp"

namespace bs = block_streamer;
using bs::HostBackend;
using bs::HostMode;

TEST_CASE("b83 a read that fails, whichever it is, is thrown once, and the next pass works") {
  const auto images = support::odd_images(6);
  const auto order = bs::ascending(0, 6);
  std::size_t failures = 0;
  for (const auto host : {HostMode::attached, HostMode::detached}) {
    for (const bool held : {false, true}) {
      for (std::size_t bad = 0;; ++bad) {
        support::ReadScript script;
        script.hold = held;
        script.outcome = [bad](std::size_t n) {
          return n == bad ? std::make_error_code(std::errc::io_error) : std::error_code{};
        };
        bs::PipelineOptions options;
        options.prefetch_ahead = 2;
        options.chunk_byte_count = 1500;
        options.staging_byte_count = 3 * 1500;
        options.computes_on_host = true;
        HostBackend backend{host};
        auto compute = backend.make_stream();
        std::mt19937 random{static_cast<unsigned>(bad)};
        bs::BlockPipeline<HostBackend, bs::InlineLoop> pipeline{
            support::ScriptedTier{images, script}, backend, options, nullptr,
            std::make_unique<bs::InlineLoop>(bs::InlineLoop::Order{}, [&] {
              return script.release(random()) || host == HostMode::detached;
            })};
        bool thrown = false;
        try {
          const std::size_t wrong = support::run_pass(pipeline, images, order, order, compute);
          CHECK(wrong == 0);
        } catch (const bs::StorageError& error) {
          thrown = true;
          CHECK(error.code() == std::errc::io_error);
          CHECK(std::string{error.what()}.find("block ") == 0);
        }
        for (int again = 0; again < 2; ++again) {
          try {  // the read may have been one that was made ahead for the pass after
            const std::size_t wrong = support::run_pass(pipeline, images, order, order, compute);
            CHECK(wrong == 0);
          } catch (const bs::StorageError&) {
            CHECK_FALSE(std::exchange(thrown, true));
          }
        }
        if (bad > script.reads) break;
        failures += thrown ? 1 : 0;
      }
    }
  }
  CHECK(failures > 20);
  WARN(failures << " reads failed in turn");
}

TEST_CASE("an exception in a visit leaves the pipeline usable") {
  const auto images = support::odd_images(5);
  const auto order = bs::ascending(0, 5);
  for (const auto host : {HostMode::attached, HostMode::detached}) {
    support::ReadScript script;
    bs::PipelineOptions options;
    options.computes_on_host = true;
    HostBackend backend{host};
    auto compute = backend.make_stream();
    bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend,
                                            options};
    for (int at = 0; at < 5; ++at) {
      const auto throwing = [&] {
        auto pass = pipeline.begin_pass(order, order, compute);
        for (int i = 0;; ++i) {
          const auto lease = pass.acquire();
          if (i == at) throw std::runtime_error{"the block failed"};
        }
      };
      CHECK_THROWS_WITH(throwing(), "the block failed");
      CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
    }
  }
}

TEST_CASE("after a failed acquire the pass is over") {
  const auto images = support::odd_images(4);
  support::ReadScript script;
  script.outcome = [](std::size_t) { return std::make_error_code(std::errc::io_error); };
  HostBackend backend;
  auto compute = backend.make_stream();
  bs::BlockPipeline<HostBackend> pipeline{support::ScriptedTier{images, script}, backend, {}};
  auto pass = pipeline.begin_pass(bs::ascending(0, 4), {}, compute);
  CHECK_THROWS_AS(pass.acquire(), bs::StorageError);
  CHECK(pass.done());
  CHECK_THROWS_AS(pass.acquire(), bs::ContractViolation);
}
