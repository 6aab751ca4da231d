// SPDX-License-Identifier: Apache-2.0
// Every tier meets every way in which files go bad before or while a model streams: one clear error
// or none, never other bytes, and the pipeline usable afterwards.
#include <block_streamer/storage/decorators/faulty_storage.hpp>
#include <block_streamer/testing/faulty_backend.hpp>

#include <storage/every_tier.hpp>
#include <storage/pattern_files.hpp>
#include <support/catch.hpp>
#include <support/restricted.hpp>

#include <filesystem>
#include <optional>
#include <string>

namespace bs = block_streamer;
namespace fs = std::filesystem;
using namespace bs::testing_support;

namespace {

/// What a failed pass said; nullopt: it did not fail. Its bytes are right as far as it came.
std::optional<bs::StorageError> failure_of_pass(Streamed& streamed, const PatternFiles& files) {
  try {
    const std::size_t wrong = streamed.pass(files);
    CHECK(wrong == 0);
    return std::nullopt;
  } catch (const bs::StorageError& error) {
    return error;
  }
}

/// A failure of the pass before, met by what was fetched ahead, is told once; then all is well.
void expect_recovered(Streamed& streamed, const PatternFiles& files) {
  static_cast<void>(failure_of_pass(streamed, files));
  CHECK(streamed.pass(files) == 0);
}

void expect_names_a_place(const bs::StorageError& error) {
  CHECK_THAT(error.what(), ContainsSubstring("block ") && ContainsSubstring("part ") &&
                               ContainsSubstring(".bin") && ContainsSubstring("offset ") &&
                               ContainsSubstring("tensor b") && ContainsSubstring("reading "));
}

/// Ends this process if a condition does not hold: in a child there is nobody to report to.
void insist(bool condition, int status) {
  if (!condition) ::_exit(status);
}

}  // namespace

TEST_CASE("b64 a file that is missing, a folder, unreadable or too short is refused at opening") {
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    const PatternFiles files;
    const fs::path file = files.files[2];
    fs::resize_file(file, 400'000);
    CHECK_THROWS_WITH(tier.make(files.map), ContainsSubstring("part 2.bin") &&
                                                ContainsSubstring("400000") &&
                                                ContainsSubstring("1048577"));
    fs::remove(file);
    CHECK_THROWS_WITH(tier.make(files.map),
                      ContainsSubstring("part 2.bin") && ContainsSubstring("No such file"));
    fs::create_directory(file);
    CHECK_THROWS_WITH(tier.make(files.map),
                      ContainsSubstring("part 2.bin") && ContainsSubstring("directory"));
    fs::remove(file);
    fs::create_symlink("part 2.bin", file);
    CHECK_THROWS_WITH(tier.make(files.map),
                      ContainsSubstring("part 2.bin") && ContainsSubstring("symbolic links"));
    fs::remove(file);
    REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
    CHECK_THROWS_AS(tier.make(files.map), bs::StorageError);
  }
}

TEST_CASE(
    "b41 b65 a file cut while it streams is an error with its place, and whole again it streams") {
  for (const TierOverFiles& tier : every_tier()) {
    for (const std::uint64_t kept : {1'048'576U, 200'000U, 4096U, 0U}) {
      INFO(tier.name << ", " << kept);
      const PatternFiles files;
      Streamed streamed{tier.make(files.map)};
      REQUIRE(streamed.pass(files) == 0);
      fs::resize_file(files.files[2], kept);
      const auto error = failure_of_pass(streamed, files);
      REQUIRE(error.has_value() == !tier.reads_files_once);
      if (error) {
        CHECK(error->code() == bs::FileErrc::shrank);
        expect_names_a_place(*error);
        CHECK_THAT(error->what(), ContainsSubstring("part 2.bin"));
      }
      write_bytes(files.files[2], pattern_bytes(2, 0, files.sizes[2]));
      expect_recovered(streamed, files);
    }
  }
}

TEST_CASE("files deleted and replaced while they stream go on being read as they were") {
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    const PatternFiles files;
    Streamed streamed{tier.make(files.map)};
    REQUIRE(streamed.pass(files) == 0);
    fs::remove(files.files[0]);
    const fs::path other = files.folder.path() / "other";
    write_bytes(other, pattern_bytes(99, 0, 2'000'000));
    fs::rename(other, files.files[2]);
    fs::rename(files.files[1], other);
    CHECK(streamed.pass(files) == 0);
    CHECK(streamed.pass(files) == 0);
  }
}

TEST_CASE("b83 an error of any read of any tier is told once, with its place") {
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    const PatternFiles files;
    for (std::uint64_t n = 0;; ++n) {
      bs::FaultScript script;
      script.fail(n, std::make_error_code(std::errc::io_error));
      Streamed streamed{bs::FaultyStorage{tier.make(files.map), script}};
      int told = 0;
      for (int pass = 0; pass < 2; ++pass) {
        if (const auto error = failure_of_pass(streamed, files)) {
          ++told;
          CHECK(error->code() == std::errc::io_error);
          expect_names_a_place(*error);
        }
      }
      streamed.pipeline().drain();
      if (script.started() <= n) break;                                 // nothing failed
      if (told == 0) told += failure_of_pass(streamed, files) ? 1 : 0;  // it was fetched ahead
      CHECK(told == 1);
      CHECK(streamed.pass(files) == 0);
    }
  }
}

TEST_CASE("a drive that is gone fails every pass that reads, and nothing hangs") {
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    const PatternFiles files;
    for (const std::uint64_t n : {0U, 3U, 9U}) {
      bs::FaultScript script;
      script.fail_from(n, std::make_error_code(std::errc::no_such_device));
      Streamed streamed{bs::FaultyStorage{tier.make(files.map), script}};
      int told = 0;
      for (int pass = 0; pass < 5; ++pass) told += failure_of_pass(streamed, files) ? 1 : 0;
      CHECK(told >= 4);  // the first pass may end before its prefetch fails
      streamed.pipeline().close();
      CHECK(failure_of_pass(streamed, files).has_value());
    }
  }
}

TEST_CASE("a system that fails every read of the files is an error of each pass, and no signal") {
  // What io_uring reads is not a call of this process's: tests/io answers for its ring.
  for (const TierOverFiles& tier : every_tier()) {
    if (tier.name.find("io_uring") != std::string::npos) continue;
    INFO(tier.name);
    const PatternFiles files;
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      static_cast<void>(::alarm(60));
      Streamed streamed{tier.make(files.map)};
      insist(streamed.pass(files) == 0, 1);
      if (!support::forbid(__NR_process_vm_readv, EFAULT) || !support::forbid(__NR_pread64, EIO)) {
        ::_exit(support::cannot_restrict);
      }
      for (int pass = 0; pass < 3; ++pass) {
        try {
          insist(streamed.pass(files) == 0, 2);
          insist(tier.reads_files_once || pass == 0, 3);
        } catch (const bs::StorageError& error) {
          insist(!tier.reads_files_once && error.code() == std::errc::io_error, 4);
          insist(std::string{error.what()}.find(".bin") != std::string::npos, 5);
        }
      }
      streamed.pipeline().close();
      ::_exit(0);
    }
    support::expect_ended_well(child);
  }
}

TEST_CASE("b29 budgets below one block are refused with both sizes before anything is read") {
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    const PatternFiles files;
    bs::FaultScript reads;
    auto options = Streamed::small_chunks();
    options.slot_byte_budget = 300'000;
    CHECK_THROWS_WITH((Streamed{bs::FaultyStorage{tier.make(files.map), reads}, options}),
                      ContainsSubstring("300000") && ContainsSubstring("block 4"));
    CHECK(reads.started() == 0);
    options.slot_byte_budget.reset();
    options.device_budget = 1;
    bs::FaultScript others;
    CHECK_THROWS_WITH(
        (Streamed{bs::FaultyStorage{tier.make(files.map), others}, options}),
        ContainsSubstring("a device_budget of 1 ") && ContainsSubstring("caches no block"));
    CHECK(others.started() == 0);
    CHECK_THROWS_WITH(bs::TieredStorage::within(tier.make(files.map), 4863),
                      ContainsSubstring("4863"));
  }
}

TEST_CASE("a device without memory for the slots is an error, and memory later is enough") {
  using Backend = bs::testing::FaultyBackend<bs::HostBackend>;
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    const PatternFiles files;
    for (std::uint64_t failing = 0; failing < 12; ++failing) {
      Backend backend{bs::HostBackend{bs::HostMode::detached}};
      auto compute = backend.make_stream();
      backend.fail_call(backend.calls() + failing);
      const auto order = bs::ascending(0, files.images.size());
      std::optional<bs::BlockPipeline<Backend>> pipeline;
      int told = 0;
      for (int round = 0; round < 3; ++round) {
        try {
          if (!pipeline) {
            pipeline.emplace(tier.make(files.map), backend, Streamed::small_chunks());
          }
          auto pass = pipeline->begin_pass(order, order, compute);
          while (!pass.done()) static_cast<void>(pass.acquire());
        } catch (const bs::DeviceError&) {
          ++told;
        }
      }
      CHECK(told <= 1);
    }
  }
}
