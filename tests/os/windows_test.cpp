// SPDX-License-Identifier: Apache-2.0
// What only the Windows twins do.
#include <block_streamer/os/atomic_replace.hpp>
#include <block_streamer/os/direct_io_windows.hpp>
#include <block_streamer/os/file.hpp>
#include <block_streamer/os/file_mapping.hpp>
#include <block_streamer/os/limits.hpp>

#include <support/safetensors_files.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

TEST_CASE("names beyond the code page open, are mapped and are replaced") {
  const support::TempFolder folder;
  const fs::path path = folder.path() / fs::path{u8"w\u00e4hrung \u20ac \u65e5\u672c.bin"};
  bs::atomic_replace(path, std::string_view{"abcdef"});
  CHECK(fs::file_size(path) == 6);
  const bs::File file = bs::File::open(path);
  std::array<char, 2> out{};
  REQUIRE_FALSE(file.read_at(3, std::as_writable_bytes(std::span{out})));
  CHECK(std::string_view{out.data(), 2} == "de");
  CHECK(bs::FileMapping{path}.size() == 6);
}

TEST_CASE("others may rename and delete a file that is open here") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "abc");
  const bs::File file = bs::File::open(folder / "f");
  fs::rename(folder / "f", folder / "g");
  fs::remove(folder / "g");
  std::array<char, 3> out{};
  REQUIRE_FALSE(file.read_at(0, std::as_writable_bytes(std::span{out})));
  CHECK(std::string_view{out.data(), 3} == "abc");
}

TEST_CASE("a place that somebody holds against replacement keeps its file") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "old");
  const bs::detail::WindowsHandle held{::CreateFileW(
      (folder / "f").c_str(), GENERIC_READ, FILE_SHARE_READ, nullptr, OPEN_EXISTING, 0, nullptr)};
  REQUIRE(held);
  CHECK_THROWS_WITH(bs::atomic_replace(folder / "f", std::string_view{"new"}),
                    ContainsSubstring("moving into place"));
  CHECK(support::read_text(folder / "f") == "old");
  CHECK(std::distance(fs::directory_iterator{folder.path()}, fs::directory_iterator{}) == 1);
}

TEST_CASE("a mapped file cannot be made shorter, and can again afterwards") {
  const support::TempFolder folder;
  support::write_text(folder / "f", std::string(10'000, 'x'));
  std::error_code error;
  {
    const bs::FileMapping mapping{folder / "f"};
    fs::resize_file(folder / "f", 100, error);
    CHECK(error);
    CHECK(fs::file_size(folder / "f") == 10'000);
  }
  fs::resize_file(folder / "f", 100, error);
  CHECK_FALSE(error);
}

TEST_CASE("a pipe is no file") {
  const std::string name = "\\\\.\\pipe\\block_streamer_" + std::to_string(::GetCurrentProcessId());
  const bs::detail::WindowsHandle server{
      ::CreateNamedPipeA(name.c_str(), PIPE_ACCESS_DUPLEX | FILE_FLAG_OVERLAPPED, PIPE_TYPE_BYTE, 1,
                         4096, 4096, 0, nullptr)};
  REQUIRE(server);
  std::error_code error;
  CHECK_FALSE(bs::File::try_open(fs::path{name}, error).is_open());
  CHECK(error == std::errc::invalid_argument);
}

TEST_CASE("unbuffered files say what their reads must be multiples of, empty ones too") {
  const support::TempFolder folder;
  for (const std::size_t size : {0U, 1U, 10'000U}) {
    support::write_text(folder / "f", std::string(size, 'x'));
    std::error_code error;
    const bs::UnbufferedFile file = bs::open_unbuffered(folder / "f", error);
    REQUIRE_FALSE(error);
    REQUIRE(file.handle);
    CHECK(file.direct.works() == (file.direct.alignment >= 512));
  }
  std::error_code error;
  CHECK_FALSE(bs::open_unbuffered(folder / "none", error).handle);
  CHECK(error == std::errc::no_such_file_or_directory);
  CHECK_FALSE(bs::open_unbuffered(folder.path(), error).handle);
  CHECK(error == std::errc::is_a_directory);
}

TEST_CASE("memory is reported, and locking it has no limit of its own") {
  const auto available = bs::available_memory();
  REQUIRE(available);
  CHECK(*available > 1'000'000);
  CHECK_FALSE(bs::memlock_limit().has_value());
}
