// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/atomic_replace.hpp>

#include <support/safetensors_files.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

std::size_t entry_count(const fs::path& folder) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator{folder}, fs::directory_iterator{}));
}

}  // namespace

TEST_CASE("a file is replaced whole") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "old");
  bs::atomic_replace(folder / "f", std::string_view{"new content"});
  CHECK(support::read_text(folder / "f") == "new content");
  bs::atomic_replace(folder / "g", std::string_view{});
  CHECK(fs::file_size(folder / "g") == 0);
  CHECK(entry_count(folder.path()) == 2);
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
