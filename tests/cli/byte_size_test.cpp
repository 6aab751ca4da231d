// SPDX-License-Identifier: Apache-2.0
#include "../../examples/cli/byte_size.hpp"

#include <support/catch.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

using block_streamer_cli::parse_byte_size;

TEST_CASE("sizes are read as users write them") {
  const std::vector<std::pair<std::string, std::uint64_t>> table{
      {"0", 0},
      {"1", 1},
      {"4096", 4096},
      {"7B", 7},
      {"007", 7},
      {"1KiB", 1024},
      {"512MiB", 512ULL << 20},
      {"512mib", 512ULL << 20},
      {"1.5GiB", 3ULL << 29},
      {"1.5 GiB", 3ULL << 29},
      {"0.25TiB", 1ULL << 38},
      {"2KB", 2000},
      {"2.5MB", 2'500'000},
      {"3GB", 3'000'000'000},
      {"1TB", 1'000'000'000'000},
      {"0.3KiB", 307},
      {"0.0001KiB", 0},
      {"9007199254740993", 9007199254740993},  // more digits than a double holds
      {"9223372036854775807", 9223372036854775807},
      {"8388607TiB", 8388607ULL << 40},
      {"8388607.9999999999999999TiB", 9223372036854775807}};
  for (const auto& [text, expected] : table) {
    INFO(text);
    std::uint64_t byte_count = 12345;
    CHECK(parse_byte_size(text, byte_count) == "");
    CHECK(byte_count == expected);
  }
}

TEST_CASE("what is no size is refused with the reason, and nothing is set") {
  const std::vector<std::pair<std::string, std::string>> table{
      {"", "is no size"},
      {"lots", "is no size"},
      {"MiB", "is no size"},
      {"5M", "is no size"},  // of 1000 or of 1024?
      {"5MiBs", "is no size"},
      {"5  MiB", "is no size"},
      {" 5MiB", "is no size"},
      {"+5", "is no size"},
      {"1e9", "is no size"},
      {"0x10", "is no size"},
      {"nan", "is no size"},
      {"inf", "is no size"},
      {".5GiB", "is no size"},
      {"1.GiB", "is no size"},
      {"1,5GiB", "is no size"},
      {"1.5.5GiB", "is no size"},
      {"-5", "is negative"},
      {"-5MiB", "is negative"},
      {"-0", "is negative"},
      {"1.5", "is a fraction of a byte"},
      {"0.5B", "is a fraction of a byte"},
      {"9223372036854775808", "is too large"},
      {"99999999999999999999", "is too large"},
      {"8388608TiB", "is too large"}};
  for (const auto& [text, expected] : table) {
    INFO(text);
    std::uint64_t byte_count = 12345;
    const std::string what = parse_byte_size(text, byte_count);
    CHECK(what.starts_with("'" + text + "' " + expected));
    CHECK(byte_count == 12345);
  }
}
