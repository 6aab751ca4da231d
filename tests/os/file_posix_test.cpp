// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/file.hpp>

#include <support/safetensors_files.hpp>

#include <sys/stat.h>

#include <support/catch.hpp>

namespace bs = block_streamer;

TEST_CASE("a pipe is refused without waiting for somebody to write to it") {
  const support::TempFolder folder;
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  std::error_code error;
  CHECK_FALSE(bs::File::try_open(folder / "pipe", error).is_open());
  CHECK(error == std::errc::invalid_argument);
}
