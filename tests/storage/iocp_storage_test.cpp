// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/storage/iocp_storage.hpp>

#include <block_streamer/storage/file_storage.hpp>

#include <io/scripted_iocp.hpp>
#include <storage/pattern_files.hpp>
#include <support/catch.hpp>

namespace bs = block_streamer;
using namespace bs::testing_support;
using ScriptedStorage = bs::BasicIocpStorage<ScriptedRuntime>;

namespace {

constexpr bs::IocpStorageOptions cached{bs::FileAccess::cached};

/// What the tier's own map, rounded outwards, should deliver.
template <class Tier>
Images images_of(const PatternFiles& files, const Tier& tier) {
  Images images;
  for (const bs::BlockSource& source : tier.block_map().blocks()) {
    images.push_back(files.expected(source));
  }
  return images;
}

bs::BlockMap iocp_map(const std::filesystem::path& file, const std::vector<bs::ByteRange>& ranges) {
  std::vector<bs::BlockSource> sources;
  for (const bs::ByteRange& range : ranges) sources.push_back(block_of({{0, range}}, 1));
  return {std::move(sources), {file}, std::vector<std::string>(ranges.size(), "layer.")};
}

}  // namespace

TEST_CASE("a tier of a completion port conforms, unbuffered and through the cache") {
  const PatternFiles files;
  const Images images = images_of(files, bs::IocpStorage{files.map});
  check_tier([&] { return bs::IocpStorage{files.map}; }, images);
  check_tier([&] { return bs::IocpStorage{files.map, cached}; }, files.images);
}

TEST_CASE("a thread pool conforms past the system's cache") {
  const PatternFiles files;
  const bs::FileStorageOptions direct{3, bs::FileAccess::direct};
  const bs::FileStorage tier{files.map, direct};
  CHECK(tier.describe().find("FILE_FLAG_NO_BUFFERING") != std::string::npos);
  Images images;
  for (const bs::BlockSource& source : tier.reader().block_map().blocks()) {
    images.push_back(files.expected(source));
  }
  check_tier([&] { return bs::FileStorage{files.map, direct}; }, images);
}

TEST_CASE("tiers of one port conform side by side") {
  const PatternFiles files;
  bs::IocpRuntime runtime{{.queue_depth = 2, .request_byte_count = 65'536}};
  bs::IocpStorage other{runtime, files.map};
  const Images images = images_of(files, other);
  Reads reads;
  start_random_reads(reads, other, 50, 3);
  check_tier([&] { return bs::IocpStorage{runtime, files.map}; }, images);
  reads.check_all(images);
}

TEST_CASE("a tier of a completion port conforms when answers come late and in any order") {
  const PatternFiles files;
  for (const std::uint32_t seed : {1U, 2U, 3U}) {
    IocpScript script;
    script.shuffle = seed;
    ScriptedRuntime runtime{{.queue_depth = 7, .request_byte_count = 65'536}, {script}};
    const Images images = images_of(files, ScriptedStorage{runtime, files.map});
    check_tier([&] { return ScriptedStorage{runtime, files.map}; }, images);
  }
}

TEST_CASE("a tier of a completion port conforms when every answer is short") {
  const PatternFiles files;
  for (const std::size_t most : {4096U, 5000U, 65'535U}) {
    IocpScript script;
    script.shorten_all = most;
    ScriptedRuntime runtime{{}, {script}};
    const Images images = images_of(files, ScriptedStorage{runtime, files.map});
    check_tier([&] { return ScriptedStorage{runtime, files.map}; }, images);
  }
}

TEST_CASE("an error at any request fails its read and no other, and the tier goes on") {
  const PatternFiles files;
  IocpScript clean;
  {
    ScriptedRuntime runtime{{.request_byte_count = 65'536}, {clean}};
    ScriptedStorage tier{runtime, files.map};
    check_whole_images(tier, images_of(files, tier));
  }
  REQUIRE(clean.offsets.size() > 8);
  for (std::size_t number = 0; number < clean.offsets.size(); ++number) {
    IocpScript script;
    script.refuse = {{number, ERROR_CRC}};
    ScriptedRuntime runtime{{.request_byte_count = 65'536}, {script}};
    ScriptedStorage tier{runtime, files.map};
    const Images images = images_of(files, tier);
    Reads reads;
    for (std::size_t b = 0; b < images.size(); ++b) {
      reads.start(tier, bs::block_at(b), {0, images[b].size()});
    }
    reads.wait();
    std::size_t failed = 0;
    for (std::size_t b = 0; b < images.size(); ++b) {
      REQUIRE(reads[b].calls == 1);
      REQUIRE(reads[b].buffer.guards_intact());
      if (reads[b].error) {
        ++failed;
        CHECK(reads[b].error == std::error_code(ERROR_CRC, std::system_category()));
      } else {
        CHECK(reads[b].buffer.holds(images[b]));
      }
    }
    CHECK(failed == 1);
    check_whole_images(tier, images);
  }
}

TEST_CASE("every request keeps to the sectors, and little more is read than is needed") {
  const PatternFiles files;
  IocpScript script;
  ScriptedRuntime runtime{{.request_byte_count = 65'536}, {script}};
  ScriptedStorage tier{runtime, files.map};
  INFO(tier.describe());
  const std::uint32_t sector = tier.image(bs::BlockId{0}).read_granularity;
  REQUIRE(tier.describe().find("FILE_FLAG_NO_BUFFERING, " + std::to_string(sector)) !=
          std::string::npos);
  REQUIRE(sector >= 512);
  for (std::size_t b = 0; b < tier.block_count(); ++b) {
    const bs::BlockSource& source = tier.block_map().blocks()[b];
    const std::uint64_t needed = files.map.blocks()[b].image.byte_count;
    CHECK(source.image.byte_count <= needed + 2 * sector * files.map.blocks()[b].extents.size());
  }
  check_whole_images(tier, images_of(files, tier));
  for (const std::uint64_t offset : script.offsets) CHECK(offset % sector == 0);
}

TEST_CASE("reads that are not aligned are refused before the system sees them") {
  const PatternFiles files;
  bs::IocpStorage tier{files.map};
  const std::uint32_t sector = tier.image(bs::BlockId{1}).read_granularity;
  CHECK(read_error(tier, bs::BlockId{1}, {1, sector}) == std::errc::invalid_argument);
  CHECK(read_error(tier, bs::BlockId{1}, {0, sector - 1}) == std::errc::invalid_argument);
}

TEST_CASE("b41 files of every awkward size are read by a port to their very end") {
  const TemporaryFolder folder;
  for (const std::size_t size : {1U, 511U, 512U, 4095U, 4096U, 4864U, (1U << 20) + 1}) {
    const auto path = folder.path() / std::to_string(size);
    write_bytes(path, pattern_bytes(size, 0, size));
    bs::IocpStorage tier{iocp_map(path, {{0, size}})};
    Bytes image = pattern_bytes(size, 0, size);
    image.resize(static_cast<std::size_t>(tier.image(bs::BlockId{0}).byte_count));
    check_whole_images(tier, Images{image});
    bs::IocpStorage through_cache{iocp_map(path, {{0, size}}), cached};
    check_whole_images(through_cache, Images{pattern_bytes(size, 0, size)});
  }
}

TEST_CASE("b65 a file that is cut after a port opened it is an error") {
  const PatternFiles files;
  for (const bs::IocpStorageOptions options : {bs::IocpStorageOptions{}, cached}) {
    std::filesystem::resize_file(files.files[2], files.sizes[2]);
    bs::IocpStorage tier{files.map, options};
    const std::uint64_t last = tier.image(bs::BlockId{4}).byte_count;
    for (const std::uintmax_t kept : {399'999U, 4096U, 0U}) {
      std::filesystem::resize_file(files.files[2], kept);
      CHECK(read_error(tier, bs::BlockId{4}, {0, last}) == bs::FileErrc::shrank);
    }
    Reads untouched;
    untouched.start(tier, bs::BlockId{1}, {0, tier.image(bs::BlockId{1}).byte_count});
    untouched.check_all(images_of(files, tier));
  }
}

TEST_CASE("b64 a file that is missing or too short for a port is named") {
  const PatternFiles files;
  std::filesystem::resize_file(files.files[2], 400'000);
  CHECK_THROWS_WITH(bs::IocpStorage{files.map},
                    ContainsSubstring("part 2.bin") && ContainsSubstring("400000"));
  std::filesystem::remove(files.files[1]);
  CHECK_THROWS_WITH(bs::IocpStorage{files.map}, ContainsSubstring("part 1.bin"));
}

TEST_CASE("a file that is deleted or replaced goes on being read by a port as it was") {
  const PatternFiles files;
  bs::IocpStorage tier{files.map};
  const Images images = images_of(files, tier);
  std::filesystem::remove(files.files[0]);
  std::filesystem::rename(files.files[1], files.folder.path() / "elsewhere");
  write_bytes(files.files[1], pattern_bytes(99, 0, 5000));
  check_whole_images(tier, images);
}

TEST_CASE("b55 a port reads beyond 4 GiB") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "sparse";
  write_bytes(path, {});
  constexpr std::uint64_t gib = std::uint64_t{1} << 30;
  std::filesystem::resize_file(path, 5 * gib);
  const std::uint64_t mark = 4 * gib + 8192;
  {
    std::fstream out{path, std::ios::binary | std::ios::in | std::ios::out};
    const Bytes bytes = pattern_bytes(7, 0, 4096);
    out.seekp(static_cast<std::streamoff>(mark));
    out.write(reinterpret_cast<const char*>(bytes.data()), 4096);
    REQUIRE(out.good());
  }
  bs::IocpStorage tier{iocp_map(path, {{0, 5 * gib}})};
  Reads reads;
  auto& read = reads.start(tier, bs::BlockId{0}, {mark, 4096});
  reads.wait();
  CHECK(read.error == std::error_code{});
  CHECK(read.buffer.holds(pattern_bytes(7, 0, 4096)));
}

TEST_CASE("b54 a port's tier destroyed with reads in flight writes nothing afterwards") {
  const PatternFiles files;
  bs::IocpRuntime runtime{{.queue_depth = 2}};
  const Images images = images_of(files, bs::IocpStorage{files.map});
  for (std::uint32_t round = 0; round < 20; ++round) {
    Reads reads;
    {
      bs::IocpStorage tier{runtime, files.map};
      start_random_reads(reads, tier, 32, round);
    }
    REQUIRE(reads.ended() == 32);
    reads.check_all(images);
  }
}

TEST_CASE("cancelling a tier ends each of its reads once, cancelled or whole") {
  const PatternFiles files;
  IocpScript script;
  script.hold = true;
  ScriptedRuntime runtime{{.queue_depth = 1}, {script}};
  ScriptedStorage tier{runtime, files.map};
  const Images images = images_of(files, tier);
  Reads reads;
  for (std::size_t b = 0; b < images.size(); ++b) {
    reads.start(tier, bs::block_at(b), {0, images[b].size()});
  }
  tier.cancel();
  script.release();
  reads.wait();
  std::size_t cancelled = 0;
  for (std::size_t b = 0; b < images.size(); ++b) {
    CHECK(reads[b].calls == 1);
    CHECK(reads[b].buffer.guards_intact());
    if (reads[b].error) {
      CHECK(reads[b].error == std::errc::operation_canceled);
      ++cancelled;
    } else {
      CHECK(reads[b].buffer.holds(images[b]));
    }
  }
  CHECK(cancelled >= 3);  // one request may have been on its way, the empty block needs none
  check_whole_images(tier, images);
}

TEST_CASE("a file of a port can also be read and waited for") {
  const PatternFiles files;
  bs::IocpRuntime runtime;
  const bs::PositionalFile file = bs::PositionalFile::open(files.files[1], bs::FileAccess::cached);
  REQUIRE_FALSE(runtime.attach(file.native_handle()));
  for (int i = 0; i < 20; ++i) {
    Bytes out(4864);
    REQUIRE_FALSE(file.read_at(0, out));
    REQUIRE(out == pattern_bytes(1, 0, 4864));
  }
}

TEST_CASE("a place in a port's image is named by file, offset and tensor") {
  const PatternFiles files;
  const bs::AnyStorage tier{bs::IocpStorage{files.map, cached}};
  const std::string text = tier.locate(bs::BlockId{3}, 778);
  CHECK(text.find("part 2.bin") != std::string::npos);
  CHECK(text.find("offset 18") != std::string::npos);
  CHECK(text.find("b3.t1") != std::string::npos);
  CHECK_FALSE(tier.addressable());
  CHECK(bs::IocpStorage{files.map, cached}.describe().find("page cache") != std::string::npos);
}
