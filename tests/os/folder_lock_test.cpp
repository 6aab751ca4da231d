// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/folder_lock.hpp>

#include <support/safetensors_files.hpp>

#include <support/catch.hpp>

#include <filesystem>
#include <utility>

namespace bs = block_streamer;
namespace fs = std::filesystem;

TEST_CASE("a folder that is locked is refused to the next, by every name, until it is released") {
  const support::TempFolder folder;
  bs::FolderLock held = bs::FolderLock::of(folder / "made/run");
  CHECK(fs::is_directory(folder / "made/run"));
  CHECK_THROWS_WITH(bs::FolderLock::of(folder / "made/run"),
                    ContainsSubstring("made") && ContainsSubstring("in use by another process"));
  CHECK_THROWS_AS(bs::FolderLock::of(folder / "made/../made/run/"), bs::Error);
  CHECK_NOTHROW(bs::FolderLock::of(folder / "made"));
  bs::FolderLock moved = std::move(held);
  CHECK_THROWS_AS(bs::FolderLock::of(folder / "made/run"), bs::Error);
  moved.release();
  CHECK_NOTHROW(bs::FolderLock::of(folder / "made/run"));
  { const bs::FolderLock again = bs::FolderLock::of(folder / "made/run"); }
  CHECK_NOTHROW(bs::FolderLock::of(folder / "made/run"));
}

TEST_CASE("the holder of a folder writes, lists and removes in it as before") {
  const support::TempFolder folder;
  const bs::FolderLock held = bs::FolderLock::of(folder / "run");
  support::write_text(folder / "run/a", "x");
  fs::rename(folder / "run/a", folder / "run/b");
  CHECK(fs::directory_iterator { folder / "run" } -> path().filename() == "b");
  fs::rename(folder / "run", folder / "moved");
  CHECK_NOTHROW(bs::FolderLock::of(folder / "run"));  // another folder with its name
  CHECK_THROWS_AS(bs::FolderLock::of(folder / "moved"), bs::Error);
  CHECK(fs::remove_all(folder / "moved") == 2);
}

TEST_CASE("a place that is no folder cannot be locked") {
  const support::TempFolder folder;
  support::write_text(folder / "file", "x");
  CHECK_THROWS_AS(bs::FolderLock::of(folder / "file"), bs::StorageError);
  CHECK_THROWS_AS(bs::FolderLock::of(folder / "file/inside"), bs::StorageError);
}
