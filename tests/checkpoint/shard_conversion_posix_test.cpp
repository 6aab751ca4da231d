// SPDX-License-Identifier: Apache-2.0
// Conversions that are killed or run out of room, in processes of their own.
#include <block_streamer/checkpoint/shard_conversion.hpp>

#include <support/packed_model.hpp>
#include <support/restricted.hpp>

#include <csignal>
#include <fstream>
#include <map>
#include <string>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

using Fixture = support::Conversion;
[[nodiscard]] auto files_of(const fs::path& folder) {
  return support::folder_contents(folder);
}

using Contents = std::map<std::string, std::string>;

/// Writes until nothing more fits.
void fill(const fs::path& file) {
  std::ofstream out{file, std::ios::binary};
  while (out) out << std::string(4096, 'x') << std::flush;
}

/// @returns which expectation failed; 0: none.
int on_a_small_disk(Fixture& f, const fs::path& disk, std::uint64_t needed,
                    const Contents& expected) {
  try {
    f.convert(disk / "packed");
    return 1;
  } catch (const bs::StorageError& error) {  // told before anything is written
    if (std::string{error.what()}.find("free") == std::string::npos) return 2;
  }
  if (!support::mount_memory(disk, needed * 2, MS_REMOUNT)) return 3;
  bs::ConversionOptions options;
  options.progress = [&](std::uint64_t done, std::uint64_t all) {
    if (done > all / 2) fill(disk / "somebody else's");  // after the room was looked at
  };
  try {
    f.convert(disk / "packed", options);
    return 4;
  } catch (const bs::StorageError& error) {
    if (error.code() != std::errc::no_space_on_device) return 5;
    if (std::string{error.what()}.find(disk.string()) == std::string::npos) return 6;
  }
  try {
    static_cast<void>(bs::Checkpoint::open(disk / "packed"));
    return 7;
  } catch (const bs::FormatError&) {
  }
  fs::remove(disk / "somebody else's");
  if (f.convert(disk / "packed").files_kept == 0) return 8;
  return files_of(disk / "packed") == expected ? 0 : 9;
}

}  // namespace

TEST_CASE("a killed conversion leaves nothing that looks whole and goes on where it was") {
  Fixture f;
  f.convert(f.packed);
  const auto expected = files_of(f.packed);
  for (int calls = 1; calls < 40; calls += 3) {
    const fs::path folder = f.folder / ("killed" + std::to_string(calls));
    const pid_t child = ::fork();
    if (child == 0) {
      int left = calls;
      bs::ConversionOptions options;
      options.progress = [&](std::uint64_t, std::uint64_t) {
        if (--left == 0) ::_exit(9);  // as SIGKILL: no destructor runs
      };
      f.convert(folder, options);
      ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    if (WEXITSTATUS(status) == 0) break;
    CHECK_FALSE(fs::exists(folder / bs::manifest_file_name));
    CHECK_THROWS_AS(bs::Checkpoint::open(folder), bs::FormatError);
    f.convert(folder);
    CHECK(files_of(folder) == expected);  // the killed run's temporary file is gone as well
  }
}

TEST_CASE("a full disk leaves no file that looks whole, and the conversion goes on later") {
  support::TinyModel model;
  model.vocabulary = 2000;  // the embedding, which comes after the blocks, is the largest
  Fixture f{model};
  f.shard_options.shard_byte_count = 1;
  f.convert(f.packed);
  const auto expected = files_of(f.packed);
  std::uint64_t largest = 0;
  for (const auto& [name, text] : expected) largest = std::max<std::uint64_t>(largest, text.size());
  const fs::path folder = f.folder / "full";
  const pid_t child = ::fork();
  if (child == 0) {  // no file may grow beyond this: writing fails as on a full disk
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{largest - 1, largest - 1};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      f.convert(folder);
    } catch (const bs::StorageError&) {
      ::_exit(3);
    }
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 3);
  for (const auto& [name, text] : files_of(folder)) {
    if (name == bs::journal_file_name) continue;
    CHECK(expected.count(name) == 1);
    CHECK(expected.at(name) == text);
  }
  CHECK_THROWS_AS(bs::Checkpoint::open(folder), bs::FormatError);
  const auto report = f.convert(folder);
  CHECK(report.files_kept > 0);
  CHECK(files_of(folder) == expected);
}

TEST_CASE(
    "a disk without room is named with the cause, and with more room the conversion goes on") {
  Fixture f;
  f.shard_options.shard_byte_count = 1;
  f.convert(f.packed);
  const auto expected = files_of(f.packed);
  std::uint64_t needed = 0;
  for (const auto& [name, text] : expected) needed += bs::round_up(text.size(), 4096);
  const fs::path disk = f.folder / "disk";
  fs::create_directory(disk);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    if (!support::own_mounts() || !support::mount_memory(disk, needed / 2)) {
      ::_exit(support::cannot_restrict);
    }
    ::_exit(on_a_small_disk(f, disk, needed, expected));
  }
  support::expect_ended_well(child);
}
