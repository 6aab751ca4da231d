// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <support/catch.hpp>

#include <string>

namespace bs = block_streamer;

TEST_CASE("a format error names file, byte and fault") {
  const bs::FormatError error{"a/model.safetensors", "the header is cut", 8};
  CHECK(std::string{error.what()} == "a/model.safetensors (at byte 8): the header is cut");
  CHECK(error.offset() == 8U);
}

TEST_CASE("a storage error names place and cause") {
  const bs::StorageError error{"x.bin", "read failed", std::make_error_code(std::errc::io_error)};
  CHECK(std::string{error.what()}.find("x.bin: read failed: ") == 0);
  CHECK(error.code() == std::errc::io_error);
}

TEST_CASE("expects throws a contract violation with its text") {
  CHECK_NOTHROW(bs::expects(true, "never"));
  try {
    bs::expects(false, "prefetch_ahead must not exceed the block count");
    FAIL("did not throw");
  } catch (const bs::ContractViolation& violation) {
    CHECK(std::string{violation.what()}.find("prefetch_ahead must") == 0);
  }
}

TEST_CASE("parts are named as messages need them") {
  CHECK(to_string(bs::PartId{bs::block_at(7)}) == "block 7");
  CHECK(to_string(bs::PartId{bs::block_at(7), 2}) == "block 7 part 2");
}
