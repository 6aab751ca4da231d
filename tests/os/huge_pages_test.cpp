// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/huge_pages.hpp>

#include <cstring>
#include <limits>

#include <support/catch.hpp>

namespace bs = block_streamer;

TEST_CASE("memory is aligned, zeroed, of the exact size and writable to its last byte") {
  for (const std::size_t size : {std::size_t{1}, std::size_t{4097}, std::size_t{5} << 20}) {
    bs::HugePages memory{size};
    REQUIRE(memory.bytes().size() == size);
    CHECK(reinterpret_cast<std::uintptr_t>(memory.bytes().data()) % bs::HugePages::alignment == 0);
    CHECK(memory.bytes().front() == std::byte{0});
    CHECK(memory.bytes().back() == std::byte{0});
    std::memset(memory.bytes().data(), 0x5A, size);
    CHECK(memory.bytes().back() == std::byte{0x5A});
  }
}

TEST_CASE("a moved owner leaves nothing behind") {
  bs::HugePages first{10'000};
  const std::byte* address = first.bytes().data();
  bs::HugePages second = std::move(first);
  CHECK(first.size() == 0);  // NOLINT(bugprone-use-after-move): the moved-from state is promised
  CHECK(first.bytes().empty());
  CHECK(second.bytes().data() == address);
  second = bs::HugePages{1};
  CHECK(second.size() == 1);
  CHECK(bs::HugePages{0}.bytes().empty());
}

TEST_CASE("impossible sizes are refused with the number") {
  CHECK_THROWS_AS(bs::HugePages{std::numeric_limits<std::size_t>::max()}, bs::StorageError);
  CHECK_THROWS_WITH(bs::HugePages{std::size_t{1} << 62},
                    ContainsSubstring("4611686018427387904 bytes"));
}
