// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/scratch_file.hpp>

#include <array>
#include <cstddef>
#include <filesystem>
#include <utility>
#include <vector>

#include <support/catch.hpp>
#include <support/fresh_folder.hpp>

namespace bs = block_streamer;

namespace {

std::vector<std::byte> pattern(std::size_t count, std::size_t seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * 7 + seed) % 251);
  return bytes;
}

}  // namespace

TEST_CASE("a scratch file gives back what was written at each place, and nothing beyond its end") {
  const auto folder = support::fresh_folder("scratch-");
  {
    bs::ScratchFile file{folder}, other{folder};
    const auto first = pattern(5000, 1), second = pattern(300, 2);
    CHECK_FALSE(file.write_at(10000, second));
    CHECK_FALSE(file.write_at(3, first));
    CHECK_FALSE(other.write_at(3, second));
    std::vector<std::byte> read(5000), end(301);
    CHECK_FALSE(file.read_at(3, read));
    CHECK(read == first);
    CHECK(file.read_at(10000, end) == bs::FileErrc::shrank);
    end.resize(300);
    CHECK_FALSE(file.read_at(10000, end));
    CHECK(end == second);
    bs::ScratchFile moved{std::move(file)};
    CHECK_FALSE(moved.read_at(3, read));
    CHECK(read == first);
  }
  CHECK(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

#if !defined(_WIN32)
TEST_CASE("a scratch file has no name while it is open") {
  const auto folder = support::fresh_folder("scratch-");
  const bs::ScratchFile file{folder};
  CHECK(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
  CHECK_FALSE(file.write_at(0, pattern(10, 0)));
}
#endif

TEST_CASE("a scratch file in a folder that is not there is refused by name") {
  CHECK_THROWS_WITH(bs::ScratchFile{"no-such-folder"},
                    ContainsSubstring("no-such-folder") && ContainsSubstring("cannot make a file"));
}
