// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/file.hpp>

#include <support/safetensors_files.hpp>

#include <thread>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

TEST_CASE("reads fill exactly the bytes asked for, at any offset") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("file", 100'003);
  support::write_text(folder / "f", data);
  const bs::File file = bs::File::open(folder / "f");
  std::error_code error;
  CHECK(file.size(error) == data.size());
  for (const auto& [offset, count] :
       {std::pair<std::size_t, std::size_t>{0, 1}, {4095, 2}, {77, 99'926}, {100'003, 0}}) {
    std::string got(count + 2, '\xEE');
    REQUIRE_FALSE(file.read_at(offset, std::as_writable_bytes(std::span{got}.subspan(1, count))));
    CHECK(got == '\xEE' + data.substr(offset, count) + '\xEE');
  }
}

TEST_CASE("a read beyond the end says that the file shrank") {
  const support::TempFolder folder;
  support::write_text(folder / "f", std::string(10, 'x'));
  const bs::File file = bs::File::open(folder / "f");
  std::array<std::byte, 4> out{};
  CHECK(file.read_at(7, out) == bs::FileErrc::shrank);
  CHECK(file.read_at(10, out) == bs::FileErrc::shrank);
  CHECK(file.read_at(~std::uint64_t{0} - 1, out) == bs::FileErrc::shrank);
  CHECK(file.read_at(std::uint64_t{1} << 63, out) == bs::FileErrc::shrank);
  CHECK_FALSE(file.read_at(6, out));
}

TEST_CASE("reads lie beyond 2 GiB and pieces may be larger than a system call moves") {
  const support::TempFolder folder;
  support::write_text(folder / "sparse", "begin");
  const std::uint64_t size = (std::uint64_t{3} << 30) + 11;
  fs::resize_file(folder / "sparse", size);
  {
    std::ofstream out{folder / "sparse", std::ios::binary | std::ios::in | std::ios::out};
    out.seekp(static_cast<std::streamoff>(size - 3));
    out << "end";
  }
  const bs::File file = bs::File::open(folder / "sparse");
  std::array<char, 3> tail{};
  REQUIRE_FALSE(file.read_at(size - 3, std::as_writable_bytes(std::span{tail})));
  CHECK(std::string_view{tail.data(), 3} == "end");
}

TEST_CASE("only regular files open, and the refusal names path and cause") {
  const support::TempFolder folder;
  std::error_code error;
  CHECK_FALSE(bs::File::try_open(folder.path(), error).is_open());
  CHECK(error == std::errc::is_a_directory);
  try {
    static_cast<void>(bs::File::open(folder / "none"));
    FAIL("did not throw");
  } catch (const bs::StorageError& refused) {
    CHECK(refused.code() == std::errc::no_such_file_or_directory);
    CHECK(std::string{refused.what()}.find((folder / "none").string()) == 0);
  }
}

TEST_CASE("a moved file keeps its descriptor and the source is closed") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "abc");
  bs::File first = bs::File::open(folder / "f");
  bs::File second = std::move(first);
  CHECK_FALSE(
      first.is_open());  // NOLINT(bugprone-use-after-move): the moved-from state is promised
  std::array<std::byte, 3> out{};
  CHECK_FALSE(second.read_at(0, out));
  second = bs::File{};
  CHECK_FALSE(second.is_open());
}

TEST_CASE("many threads read one file") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("shared", 50'000);
  support::write_text(folder / "f", data);
  const bs::File file = bs::File::open(folder / "f");
  std::array<bool, 4> right{};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < right.size(); ++t) {
    threads.emplace_back([&, t] {
      std::string got(9'999, '\0');
      right[t] = true;
      for (std::size_t offset = t; offset + got.size() < data.size(); offset += 7'001) {
        const auto error = file.read_at(offset, std::as_writable_bytes(std::span{got}));
        right[t] = right[t] && !error && got == data.substr(offset, got.size());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(right == std::array{true, true, true, true});
}
