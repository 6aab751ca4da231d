// SPDX-License-Identifier: Apache-2.0
// FileStorage and MappedStorage: two ways to read the same files, and so the same tests.
#include <block_streamer/storage/file_storage.hpp>

#include <block_streamer/storage/mapped_storage.hpp>

#include <storage/pattern_files.hpp>
#include <support/catch.hpp>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

/// One block per file range.
bs::BlockMap file_map(const std::filesystem::path& file, const std::vector<bs::ByteRange>& ranges) {
  std::vector<bs::BlockSource> sources;
  for (const bs::ByteRange& range : ranges) sources.push_back(block_of({{0, range}}, 1));
  return {std::move(sources), {file}, std::vector<std::string>(ranges.size(), "layer.")};
}

}  // namespace

TEMPLATE_TEST_CASE("a tier over files conforms", "", bs::FileStorage, bs::MappedStorage) {
  const PatternFiles files;
  check_tier([&] { return TestType{files.map, 3}; }, files.images);
}

TEMPLATE_TEST_CASE("reads at a granularity are rounded over the ends of files and give zeros there",
                   "", bs::FileStorage, bs::MappedStorage) {
  for (const std::uint32_t granularity : {512U, 4096U}) {
    const PatternFiles files{granularity};
    TestType tier{files.map};
    check_whole_images(tier, files.images);
    Reads reads;
    start_random_reads(reads, tier, 60, granularity);
    reads.check_all(files.images);
  }
}

TEMPLATE_TEST_CASE("a place in the image is named by file, offset and tensor", "", bs::FileStorage,
                   bs::MappedStorage) {
  const PatternFiles files;
  const bs::AnyStorage tier{TestType{files.map}};
  const std::string text = tier.locate(bs::BlockId{3}, 778);
  CHECK(text.find("part 2.bin") != std::string::npos);
  CHECK(text.find("offset 18") != std::string::npos);
  CHECK(text.find("b3.t1") != std::string::npos);
  CHECK_FALSE(tier.addressable());
}

TEMPLATE_TEST_CASE("b41_files_of_every_awkward_size_are_read_to_their_very_end", "",
                   bs::FileStorage, bs::MappedStorage) {
  const TemporaryFolder folder;
  const std::vector<std::size_t> sizes{1, 511, 512, 4095, 4096, 4864, (1U << 20) + 1};
  for (const std::size_t size : sizes) {
    const auto path = folder.path() / std::to_string(size);
    write_bytes(path, pattern_bytes(size, 0, size));
    TestType tier{file_map(path, {{0, size}})};
    check_whole_images(tier, Images{pattern_bytes(size, 0, size)});
  }
}

TEMPLATE_TEST_CASE("b41_b65_a_file_that_is_cut_after_opening_is_an_error_and_never_a_signal", "",
                   bs::FileStorage, bs::MappedStorage) {
  const PatternFiles files;
  TestType tier{files.map};
  const std::uint64_t last = files.images[4].size();
  for (const std::uintmax_t kept : {400'000U, 399'999U, 4096U, 0U}) {
    if (!cut_file(files.files[2], kept)) return;
    CHECK(read_error(tier, bs::BlockId{4}, {last - 2, 2}) == bs::FileErrc::shrank);
    CHECK(read_error(tier, bs::BlockId{4}, {0, last}) == bs::FileErrc::shrank);
  }
  Reads untouched;
  untouched.start(tier, bs::BlockId{1}, {0, files.images[1].size()});
  untouched.check_all(files.images);
}

TEMPLATE_TEST_CASE("b65_a_file_that_is_cut_while_200_reads_run_fails_them_or_not_but_never_lies",
                   "", bs::FileStorage, bs::MappedStorage) {
  const PatternFiles files;
  TestType tier{files.map, 3};
  Reads reads;
  bool cut = false;
  for (std::uint64_t i = 0; i < 200; ++i) {
    reads.start(tier, bs::BlockId{4}, {i * 1000, 100'001});
    if (i == 100) cut = cut_file(files.files[2], 200'000);
  }
  reads.wait();
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const auto& read = reads[i];
    const bool beyond = 100'000 + read.range.offset + read.range.byte_count > 200'000;
    REQUIRE(read.calls == 1);
    if (read.error) {
      REQUIRE(beyond);
      REQUIRE(read.error == bs::FileErrc::shrank);
    } else {
      REQUIRE(read.buffer.holds(pattern_bytes(2, 100'000 + read.range.offset, 100'001)));
    }
  }
  REQUIRE(static_cast<bool>(reads[199].error) == cut);
}

TEMPLATE_TEST_CASE("a file that is deleted or replaced goes on being read as it was", "",
                   bs::FileStorage, bs::MappedStorage) {
  const PatternFiles files;
  TestType tier{files.map};
  std::filesystem::remove(files.files[0]);
  std::filesystem::rename(files.files[1], files.folder.path() / "elsewhere");
  write_bytes(files.files[1], pattern_bytes(99, 0, 5000));
  check_whole_images(tier, files.images);
}

TEMPLATE_TEST_CASE("b64_a_file_that_is_missing_or_too_short_at_opening_is_named_with_its_sizes", "",
                   bs::FileStorage, bs::MappedStorage) {
  const PatternFiles files;
  std::filesystem::resize_file(files.files[2], 400'000);
  try {
    const TestType tier{files.map};
    FAIL("opened");
  } catch (const bs::StorageError& error) {
    const std::string what = error.what();
    CHECK(what.find("part 2.bin") != std::string::npos);
    CHECK(what.find("400000") != std::string::npos);
    CHECK(what.find("1048577") != std::string::npos);
  }
  std::filesystem::remove(files.files[1]);
  try {
    const TestType tier{files.map};
    FAIL("opened");
  } catch (const bs::StorageError& error) {
    CHECK(std::string{error.what()}.find("part 1.bin") != std::string::npos);
    CHECK(error.code() == std::errc::no_such_file_or_directory);
  }
}

TEMPLATE_TEST_CASE("b55_offsets_beyond_4_gib_and_images_beyond_2_gib_reach_the_right_bytes", "",
                   bs::FileStorage, bs::MappedStorage) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "sparse";
  write_bytes(path, {});
  constexpr std::uint64_t gib = std::uint64_t{1} << 30;
  std::filesystem::resize_file(path, 5 * gib);
  const std::vector<std::uint64_t> marks{0,           2 * gib - 3, 2 * gib + 6,
                                         4 * gib - 5, 4 * gib + 7, 5 * gib - 8};
  {
    std::fstream out{path, std::ios::binary | std::ios::in | std::ios::out};
    for (const std::uint64_t mark : marks) {
      const Bytes bytes = pattern_bytes(mark, 0, 8);
      out.seekp(static_cast<std::streamoff>(mark));
      out.write(reinterpret_cast<const char*>(bytes.data()), 8);
    }
    REQUIRE(out.good());
  }
  TestType tier{file_map(path, {{0, 5 * gib}, {4 * gib + 7, 100}})};
  CHECK(tier.image(bs::BlockId{0}).byte_count == 5 * gib);
  for (const std::uint64_t mark : marks) {
    Reads reads;
    auto& read = reads.start(tier, bs::BlockId{0}, {mark, 8});
    reads.wait();
    CHECK(read.error == std::error_code{});
    CHECK(read.buffer.holds(pattern_bytes(mark, 0, 8)));
  }
  Reads reads;
  auto& read = reads.start(tier, bs::BlockId{1}, {0, 8});
  reads.wait();
  CHECK(read.buffer.holds(pattern_bytes(4 * gib + 7, 0, 8)));
}

TEMPLATE_TEST_CASE("b54_a_tier_destroyed_with_reads_in_flight_writes_nothing_afterwards", "",
                   bs::FileStorage, bs::MappedStorage) {
  const PatternFiles files;
  for (std::uint32_t round = 0; round < 20; ++round) {
    Reads reads;
    {
      TestType tier{files.map, 2};
      start_random_reads(reads, tier, 32, round);
    }
    REQUIRE(reads.ended() == 32);
    reads.check_all(files.images);
  }
}
