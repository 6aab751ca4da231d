// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/trace/statistics.hpp>

#include <support/catch.hpp>

#include <set>
#include <string>

namespace bs = block_streamer;

TEST_CASE("peaks follow the gauges and a reset restarts them from what is resident") {
  bs::Statistics s;
  s.add_resident(100);
  s.add_resident(50);
  s.remove_resident(100);
  s.bytes_read = 7;
  s.storage_wait_s = 0.5;
  s.bound_bytes = 9;
  CHECK(s.peak_resident_blocks == 2);
  CHECK(s.peak_resident_bytes == 150);
  CHECK(s.resident_bytes == 50);

  s.reset();
  CHECK(s.bytes_read == 0);
  CHECK(s.storage_wait_s == 0);
  CHECK(s.bound_bytes == 9);
  CHECK(s.resident_blocks == 1);
  CHECK(s.peak_resident_blocks == 1);
  CHECK(s.peak_resident_bytes == 50);
}

TEST_CASE("the list names every statistic once, in order, with its value") {
  bs::Statistics s;
  s.passes = 1;
  s.visits = 2;
  s.fetches = 3;
  s.bytes_needed = 4;
  s.bytes_read = 5;
  s.bytes_copied = 6;
  s.bytes_copied_out = 7;
  s.bytes_converted = 8;
  s.resident_blocks = 9;
  s.resident_bytes = 10;
  s.peak_resident_blocks = 11;
  s.peak_resident_bytes = 12;
  s.bound_bytes = 13;
  s.storage_wait_s = 14;
  s.device_wait_s = 15;
  std::set<std::string> names;
  double expected = 1;
  bs::for_each_statistic(s, [&](std::string_view name, auto value) {
    CHECK(static_cast<double>(value) == expected);
    expected += 1;
    names.emplace(name);
    CHECK(std::is_same_v<decltype(value), double> == name.ends_with("_s"));
  });
  CHECK(names.size() == 15);
  CHECK(names.contains("bytes_copied_out"));
}
