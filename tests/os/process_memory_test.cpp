// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/huge_pages.hpp>
#include <block_streamer/os/process_memory.hpp>

#include <cstddef>
#include <cstring>

#include <support/catch.hpp>

namespace bs = block_streamer;

TEST_CASE("memory that is touched is resident, and its peak stays when it is gone") {
  const auto before = bs::resident_memory();
  if (!before) return;  // a system that does not tell
  constexpr std::size_t byte_count = std::size_t{64} << 20;
  {
    bs::HugePages memory{byte_count};  // goes back to the system, whatever keeps freed memory
    std::memset(memory.bytes().data(), 1, byte_count);
    const auto with = bs::resident_memory();
    REQUIRE(with);
    CHECK(*with >= *before + byte_count / 2);
  }
  const auto after = bs::resident_memory(), peak = bs::peak_resident_memory();
  REQUIRE(peak);
  REQUIRE(after);
  CHECK(*after < *before + byte_count / 2);
  CHECK(*peak >= *before + byte_count / 2);
}

#if !defined(_WIN32)
TEST_CASE("a value of the process's status is read by its exact key and unit") {
  CHECK(bs::parse_status_line("VmHWM:\t   1234 kB", "VmHWM:") == 1234U * 1024);
  CHECK(bs::parse_status_line("VmHWM: 7 kB", "VmHWM:") == 7U * 1024);
  CHECK_FALSE(bs::parse_status_line("VmRSS: 7 kB", "VmHWM:"));
  CHECK_FALSE(bs::parse_status_line("VmHWM: 7 MB", "VmHWM:"));
  CHECK_FALSE(bs::parse_status_line("VmHWM:", "VmHWM:"));
  CHECK_FALSE(bs::parse_status_line("VmHWM: \t", "VmHWM:"));
  CHECK_FALSE(bs::parse_status_line("VmHWM: 99999999999999999999 kB", "VmHWM:"));
}
#endif
