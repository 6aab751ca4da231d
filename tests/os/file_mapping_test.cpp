// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/file_mapping.hpp>

#include <support/safetensors_files.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

std::span<std::byte> writable(std::string& text) {
  return std::as_writable_bytes(std::span{text});
}

}  // namespace

TEST_CASE("a mapping copies any range") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("mapped", 70'001);
  support::write_text(folder / "f", data);
  const bs::FileMapping mapping{folder / "f"};
  REQUIRE(mapping.size() == data.size());
  for (const auto& [offset, count] :
       {std::pair<std::size_t, std::size_t>{0, 70'001}, {4095, 4098}, {70'000, 1}, {70'001, 0}}) {
    std::string out(count, '\0');
    REQUIRE_FALSE(mapping.copy_out(offset, writable(out)));
    CHECK(out == data.substr(offset, count));
  }
  std::string out(2, '\0');
  CHECK(mapping.copy_out(70'000, writable(out)) == bs::FileErrc::shrank);
  CHECK(mapping.copy_out(~std::uint64_t{0}, writable(out)) == bs::FileErrc::shrank);
}

TEST_CASE("a file deleted after mapping is still read whole") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("gone", 9'000);
  support::write_text(folder / "f", data);
  const bs::FileMapping mapping{folder / "f"};
  fs::remove(folder / "f");
  std::string out(9'000, '\0');
  CHECK_FALSE(mapping.copy_out(0, writable(out)));
  CHECK(out == data);
}

TEST_CASE("an empty file maps to nothing and a missing one is refused") {
  const support::TempFolder folder;
  support::write_text(folder / "empty", "");
  const bs::FileMapping mapping{folder / "empty"};
  CHECK(mapping.size() == 0);
  CHECK_FALSE(mapping.copy_out(0, {}));
  mapping.drop_pages({0, 100});
  CHECK_THROWS_AS(bs::FileMapping{folder / "none"}, bs::StorageError);
}

TEST_CASE("dropped pages read the same again") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("drop", 4 * 4096 + 5);
  support::write_text(folder / "f", data);
  bs::FileMapping first{folder / "f"};
  bs::FileMapping mapping = std::move(first);
  std::string out(data.size(), '\0');
  mapping.will_need({10, 4096});
  REQUIRE_FALSE(mapping.copy_out(0, writable(out)));
  mapping.drop_pages({100, 3 * 4096});
  mapping.drop_pages({0, data.size()});
  out.assign(data.size(), '\0');
  REQUIRE_FALSE(mapping.copy_out(0, writable(out)));
  CHECK(out == data);
}
