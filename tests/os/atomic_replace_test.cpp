// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/atomic_replace.hpp>

#include <support/safetensors_files.hpp>

#include <sys/resource.h>

#include <csignal>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

std::size_t entry_count(const fs::path& folder) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator{folder}, fs::directory_iterator{}));
}

/// Files of this process may not grow beyond `limit` bytes while it lives: a full disk.
class FullDisk {
 public:
  explicit FullDisk(rlim_t limit) : signal_{std::signal(SIGXFSZ, SIG_IGN)} {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    rlimit lower = old_;
    lower.rlim_cur = limit;
    ::setrlimit(RLIMIT_FSIZE, &lower);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, signal_);
  }

 private:
  rlimit old_{};
  void (*signal_)(int);
};

}  // namespace

TEST_CASE("a file is replaced whole and keeps its permissions") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "old");
  fs::permissions(folder / "f", fs::perms::owner_read | fs::perms::owner_write);
  bs::atomic_replace(folder / "f", std::string_view{"new content"});
  CHECK(support::read_text(folder / "f") == "new content");
  CHECK(fs::status(folder / "f").permissions() == (fs::perms::owner_read | fs::perms::owner_write));
  bs::atomic_replace(folder / "g", std::string_view{});
  CHECK(fs::file_size(folder / "g") == 0);
  CHECK(entry_count(folder.path()) == 2);
}

TEST_CASE("a full disk leaves the old file whole and nothing beside it") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "old");
  const std::string large(20'000, 'x');
  {
    const FullDisk full{4096};
    CHECK_THROWS_WITH(bs::atomic_replace(folder / "f", std::string_view{large}),
                      Catch::Matchers::Contains((folder / "f").string()) &&
                          Catch::Matchers::Contains("untouched"));
  }
  CHECK(support::read_text(folder / "f") == "old");
  CHECK(entry_count(folder.path()) == 1);
}

TEST_CASE("a file that is never committed leaves no trace") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "old");
  {
    bs::ReplacingFile file{folder / "f"};
    file.append(std::as_bytes(std::span{std::string_view{"half"}}));
    CHECK(entry_count(folder.path()) == 2);
  }
  CHECK(support::read_text(folder / "f") == "old");
  CHECK(entry_count(folder.path()) == 1);
}

TEST_CASE("a place that cannot be written is refused before and after writing") {
  const support::TempFolder folder;
  CHECK_THROWS_AS(bs::atomic_replace(folder / "no/such/f", std::string_view{"x"}),
                  bs::StorageError);
  fs::create_directories(folder / "taken" / "inside");
  CHECK_THROWS_AS(bs::atomic_replace(folder / "taken", std::string_view{"x"}), bs::StorageError);
  CHECK(fs::is_directory(folder / "taken" / "inside"));
  CHECK(entry_count(folder.path()) == 1);
}

TEST_CASE("two writers of one file do not disturb each other") {
  const support::TempFolder folder;
  bs::ReplacingFile first{folder / "f"};
  bs::ReplacingFile second{folder / "f"};
  first.append(std::as_bytes(std::span{std::string_view{"first"}}));
  second.append(std::as_bytes(std::span{std::string_view{"second"}}));
  second.commit();
  CHECK(support::read_text(folder / "f") == "second");
  first.commit();
  CHECK(support::read_text(folder / "f") == "first");
  CHECK(entry_count(folder.path()) == 1);
}

TEST_CASE("a link is followed, not replaced") {
  const support::TempFolder folder;
  support::write_text(folder / "real", "old");
  fs::create_symlink("real", folder / "link");
  bs::atomic_replace(folder / "link", std::string_view{"new"});
  CHECK(fs::is_symlink(folder / "link"));
  CHECK(support::read_text(folder / "real") == "new");
}
