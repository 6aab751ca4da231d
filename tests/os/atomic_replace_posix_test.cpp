// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/atomic_replace.hpp>

#include <support/safetensors_files.hpp>

#include <sys/resource.h>

#include <csignal>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

std::size_t entries_in(const fs::path& folder) {
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

TEST_CASE("a replaced file keeps its permissions") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "old");
  fs::permissions(folder / "f", fs::perms::owner_read | fs::perms::owner_write);
  bs::atomic_replace(folder / "f", std::string_view{"new content"});
  CHECK(fs::status(folder / "f").permissions() == (fs::perms::owner_read | fs::perms::owner_write));
}

TEST_CASE("a full disk leaves the old file whole and nothing beside it") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "old");
  const std::string large(20'000, 'x');
  {
    const FullDisk full{4096};
    CHECK_THROWS_WITH(bs::atomic_replace(folder / "f", std::string_view{large}),
                      ContainsSubstring((folder / "f").string()) && ContainsSubstring("untouched"));
  }
  CHECK(support::read_text(folder / "f") == "old");
  CHECK(entries_in(folder.path()) == 1);
}

TEST_CASE("a link is followed, not replaced") {
  const support::TempFolder folder;
  support::write_text(folder / "real", "old");
  fs::create_symlink("real", folder / "link");
  bs::atomic_replace(folder / "link", std::string_view{"new"});
  CHECK(fs::is_symlink(folder / "link"));
  CHECK(support::read_text(folder / "real") == "new");
}
