// SPDX-License-Identifier: Apache-2.0
// Every tier over the file systems that models lie on, and where files or memory are scarce. What
// a system does not let a program without rights have is skipped with a word.
#include <block_streamer/os/limits.hpp>
#include <block_streamer/storage/uring_storage.hpp>

#include <storage/every_tier.hpp>
#include <storage/pattern_files.hpp>
#include <support/catch.hpp>
#include <support/peak_memory.hpp>
#include <support/restricted.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace bs = block_streamer;
namespace fs = std::filesystem;
using namespace bs::testing_support;

namespace {

fs::path folder_of_case() {
  const char* const folder = std::getenv("BLOCK_STREAMER_FOLDER");
  REQUIRE(folder != nullptr);
  return folder;
}

/// Runs a hidden case with a file system mounted in the folder `there`.
template <class Mount>
void run_mounted(const std::string& expected, Mount mount,
                 const fs::path& parent = fs::temp_directory_path()) {
  const TemporaryFolder folder{parent};
  const fs::path there = folder.path() / "there";
  fs::create_directory(there);
  support::run_restricted("restricted: files in a folder", expected, [&] {
    ::setenv("BLOCK_STREAMER_FOLDER", there.c_str(), 1);
    return support::own_mounts() && mount(there);
  });
  std::error_code ignored;  // an overlay leaves a folder that only root can list, and so remove
  fs::permissions(folder.path() / "work" / "work", fs::perms::owner_all, ignored);
}

/// The soft limit of open files, for a while.
class OpenFiles {
 public:
  explicit OpenFiles(rlim_t most) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const rlimit lower{most, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &lower) == 0);
  }
  OpenFiles(const OpenFiles&) = delete;
  OpenFiles& operator=(const OpenFiles&) = delete;
  ~OpenFiles() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

std::vector<int> open_descriptors() {
  std::vector<int> open;
  for (const auto& entry : fs::directory_iterator{"/proc/self/fd"}) {
    open.push_back(std::stoi(entry.path().filename().string()));
  }
  std::ranges::sort(open);
  return open;
}

/// The tier with no more than `limit` descriptors. nullopt: refused, as it has to be.
std::optional<bs::AnyStorage> made_within(const TierOverFiles& tier, const PatternFiles& files,
                                          rlim_t limit) {
  const OpenFiles scarce{limit};
  try {
    return tier.make(files.map);
  } catch (const bs::StorageError& error) {
    CHECK(error.code() == std::errc::too_many_files_open);
    CHECK_THAT(error.what(), ContainsSubstring("part ") && ContainsSubstring("ulimit -n"));
    return std::nullopt;
  }
}

constexpr std::uint64_t group_limit = std::uint64_t{96} << 20;

/// Blocks of 16 MiB in a file four times as large as the group's limit, nearly all of it holes.
struct LargeFile {
  explicit LargeFile(const fs::path& folder) : path{folder / "large"} {
    write_bytes(path, {});
    fs::resize_file(path, count * size);
    std::fstream out{path, std::ios::binary | std::ios::in | std::ios::out};
    std::vector<bs::BlockSource> sources;
    for (std::uint64_t b = 0; b < count; ++b) {
      const Bytes& mark = marks.emplace_back(pattern_bytes(b, 0, 4096));
      out.seekp(static_cast<std::streamoff>(b * size));
      out.write(reinterpret_cast<const char*>(mark.data()), 4096);
      sources.push_back(block_of({{0, {b * size, size}}}, 4096));
    }
    REQUIRE(out.good());
    map = {std::move(sources), {path}, std::vector<std::string>(count, "b.")};
  }
  /// @returns how many blocks had other bytes.
  std::size_t stream(bs::AnyStorage tier) const {
    bs::PipelineOptions options;
    options.chunk_byte_count = 1 << 20;
    options.staging_byte_count = 4 << 20;
    Streamed streamed{std::move(tier), options};
    const auto check = [this](std::span<const std::byte> slot, std::size_t b) -> std::size_t {
      const auto rest = slot.subspan(marks[b].size());
      const bool zeros = rest[0] == std::byte{0} &&
                         std::memcmp(rest.data(), rest.data() + 1, rest.size() - 1) == 0;
      return zeros && std::ranges::equal(slot.first(marks[b].size()), marks[b]) ? 0 : 1;
    };
    return streamed.pass(check) + streamed.pass(check);
  }

  static constexpr std::uint64_t size = std::uint64_t{16} << 20;
  static constexpr std::uint64_t count = 4 * group_limit / size;
  fs::path path;
  bs::BlockMap map;
  Images marks;  ///< the beginning of each
};

}  // namespace

TEST_CASE("restricted: files in a folder", "[.]") {
  const PatternFiles rounded{4096, folder_of_case()};
  const PatternFiles exact{1, folder_of_case()};
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    bs::AnyStorage storage = tier.make(rounded.map);
    check_whole_images(storage, rounded.images);
    Reads reads;
    start_random_reads(reads, storage, 60, 1);
    reads.check_all(rounded.images);
    check_streamed(tier.make(exact.map), exact);
  }
  const std::string described = bs::UringStorage{exact.map}.describe();
  WARN(described);
  CHECK(described.find(support::expectation()) != std::string::npos);
}

TEST_CASE("b60 every tier over a file system in memory") {
  run_mounted("page cache (part 0.bin: the file lies in memory)",
              [](const fs::path& there) { return support::mount_memory(there, 16 << 20); });
}

TEST_CASE("b60 b61 every tier over an overlay, of a disk and of memory") {
  run_mounted("", [](const fs::path& there) { return support::mount_overlay(there); });
  run_mounted("", [](const fs::path& there) {
    const fs::path in_memory = there.parent_path() / "memory";
    fs::create_directory(in_memory);
    if (!support::mount_memory(in_memory, 16 << 20)) return false;
    fs::create_directory(in_memory / "merged");
    return support::mount_overlay(in_memory / "merged") &&
           ::mount((in_memory / "merged").c_str(), there.c_str(), nullptr, MS_BIND, nullptr) == 0;
  });
}

TEST_CASE("every tier over a disk whose sectors have 4096 bytes") {
  run_mounted("O_DIRECT, 4096-byte blocks",
              [](const fs::path& there) { return support::mount_4096_byte_sectors(there); });
}

TEST_CASE("with few open files a tier works or names the file that it could not open") {
  const PatternFiles files{4096};
  for (const TierOverFiles& tier : every_tier()) {
    INFO(tier.name);
    static_cast<void>(tier.make(files.map));  // what is opened once and stays
    const std::vector<int> before = open_descriptors();
    int refused = 0, made = 0;
    for (rlim_t limit = 0; made < 6; ++limit) {
      REQUIRE(limit < static_cast<rlim_t>(before.back()) + 12);
      if (auto storage = made_within(tier, files, limit)) {
        ++made;
        if (made < 3) check_whole_images(*storage, files.images);
      } else {
        ++refused;
      }
      CHECK(open_descriptors() == before);
    }
    CHECK(refused > 0);
  }
}

TEST_CASE("a ring for which no file may be opened is a thread pool, with the reason") {
  const PatternFiles files{512};
  std::optional<bs::UringRuntime> runtime;
  {
    const OpenFiles scarce{0};
    runtime.emplace();
  }
  bs::UringStorage storage{*runtime, files.map};
  check_whole_images(storage, files.images);
#if defined(BLOCK_STREAMER_HAS_LIBURING)
  INFO(storage.describe());
  CHECK_FALSE(storage.uses_ring());
  CHECK(storage.describe().find("ulimit -n") != std::string::npos);
#endif
}

TEST_CASE("restricted: a model four times as large as memory", "[.]") {
  const LargeFile file{folder_of_case()};
  const auto available = bs::available_memory();
  REQUIRE(available);
  CHECK(*available <= group_limit);
  for (const TierOverFiles& tier : every_tier()) {
    if (tier.reads_files_once || tier.name.starts_with("tiered")) continue;  // asked for too much
    INFO(tier.name);
    CHECK(file.stream(tier.make(file.map)) == 0);
  }
  const std::uint64_t budget = *available / 4;
  auto part = bs::TieredStorage::within(bs::FileStorage{file.map}, budget);
  CHECK(part.memory_block_count() == budget / LargeFile::size);
  CHECK(file.stream(std::move(part)) == 0);
  CHECK(support::peak_kibibytes() < static_cast<std::int64_t>(group_limit / 1024));
}

TEST_CASE("b69 in a group with little memory, models four times as large stream through any tier") {
  if (support::sanitized) return;  // shadows and quarantine take more memory than the group has
  const TemporaryFolder folder;
  const support::MemoryGroup group{group_limit};
  support::run_restricted("restricted: a model four times as large as memory", "", [&] {
    ::setenv("BLOCK_STREAMER_FOLDER", folder.path().c_str(), 1);
    return group.join();
  });
}
