// SPDX-License-Identifier: Apache-2.0
// The tiers that read past the page cache: UringStorage, with a ring and without one, and
// FileStorage's direct mode.
#include <block_streamer/storage/uring_storage.hpp>

#include <block_streamer/checkpoint/block_image_check.hpp>
#include <block_streamer/io/uring_refusal.hpp>
#include <block_streamer/storage/file_storage.hpp>

#include <storage/pattern_files.hpp>
#include <support/catch.hpp>

#include <fcntl.h>

#include <atomic>
#include <thread>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

/// Refuses to open, as a container's profile makes the system do.
std::unique_ptr<bs::UringRing> refuse(const bs::UringOptions&, bs::UringReport& report) {
  report.refusal = bs::uring_refusal(EPERM);
  return nullptr;
}

/// Small requests, so that every read becomes many.
bs::UringOptions small_requests(std::uint32_t depth) {
  bs::UringOptions options;
  options.queue_depth = depth;
  options.request_byte_count = 8192;
  return options;
}

struct OverRing {
  static bs::AnyStorage make(bs::BlockMap map) { return bs::UringStorage{std::move(map)}; }
};
struct OverShallowRing {
  static bs::AnyStorage make(bs::BlockMap map) {
    struct Owner {
      bs::UringRuntime runtime{small_requests(1)};
    };
    return with(std::make_unique<Owner>(), std::move(map));
  }
  template <class Owner>
  struct Tier {
    std::unique_ptr<Owner> owner;
    bs::UringStorage storage;
    std::size_t block_count() const noexcept { return storage.block_count(); }
    const bs::BlockImage& image(bs::BlockId b) const noexcept { return storage.image(b); }
    void async_read(bs::BlockId b, bs::ByteRange r, std::span<std::byte> o,
                    bs::IoCompletion d) noexcept {
      storage.async_read(b, r, o, std::move(d));
    }
    std::string locate(bs::BlockId b, std::uint64_t at) const { return storage.locate(b, at); }
  };
  template <class Owner>
  static bs::AnyStorage with(std::unique_ptr<Owner> owner, bs::BlockMap map) {
    bs::UringStorage storage{owner->runtime, std::move(map)};
    return Tier<Owner>{std::move(owner), std::move(storage)};
  }
};
struct WithoutRing {
  static bs::AnyStorage make(bs::BlockMap map) {
    struct Owner {
      bs::UringRuntime runtime{{}, refuse};
    };
    return OverShallowRing::with(std::make_unique<Owner>(), std::move(map));
  }
};
struct DirectPool {
  static bs::AnyStorage make(bs::BlockMap map) {
    return bs::FileStorage{std::move(map), {3, bs::FileAccess::direct}};
  }
};

bs::BlockMap map_of(const std::filesystem::path& file, const std::vector<bs::ByteRange>& ranges,
                    std::uint32_t granularity = 4096) {
  std::vector<bs::BlockSource> sources;
  for (const bs::ByteRange& range : ranges) {
    sources.push_back(block_of({{0, range}}, granularity));
  }
  return {std::move(sources), {file}, std::vector<std::string>(ranges.size(), "layer.")};
}

/// The block's slot, put together from its image as the pipeline does.
Bytes slot_of(bs::AnyStorage& tier, bs::BlockId block) {
  const bs::BlockImage& image = tier.image(block);
  Reads reads;
  auto& read = reads.start(tier, block, {0, image.byte_count});
  reads.wait();
  REQUIRE(read.error == std::error_code{});
  Bytes slot(static_cast<std::size_t>(image.layout.slot_byte_count[0]), poison);
  for (const bs::Segment& s : image.segments) {
    const auto from = read.buffer.span().subspan(s.image_offset, s.byte_count);
    std::ranges::copy(from, slot.begin() + static_cast<std::ptrdiff_t>(s.slot_offset));
  }
  return slot;
}

std::filesystem::path memory_folder() {
  return std::filesystem::is_directory("/dev/shm") ? "/dev/shm"
                                                   : std::filesystem::temp_directory_path();
}

}  // namespace

TEMPLATE_TEST_CASE("a tier past the page cache conforms", "", OverRing, OverShallowRing,
                   WithoutRing, DirectPool) {
  for (const std::uint32_t granularity : {512U, 4096U}) {
    const PatternFiles files{granularity};
    bs::AnyStorage tier = TestType::make(files.map);
    check_whole_images(tier, files.images);
    for (std::uint32_t seed = 0; seed < 4; ++seed) {
      Reads reads;
      start_random_reads(reads, tier, 60, seed);
      reads.check_all(files.images);
    }
  }
  const PatternFiles files{4096};
  check_tier([&] { return TestType::make(files.map); }, files.images);
}

TEMPLATE_TEST_CASE("b60 a tier over files in memory reads them through the page cache at any byte",
                   "", OverRing, OverShallowRing, WithoutRing, DirectPool) {
  const PatternFiles files{1, memory_folder()};
  check_tier([&] { return TestType::make(files.map); }, files.images);
}

TEMPLATE_TEST_CASE("a map of exact ranges is rounded to the file system's blocks, slots unchanged",
                   "", OverRing, WithoutRing, DirectPool) {
  const PatternFiles exact{1};
  bs::AnyStorage plain = bs::FileStorage{exact.map};
  bs::AnyStorage tier = TestType::make(exact.map);
  REQUIRE(tier.block_count() == plain.block_count());
  for (std::size_t b = 0; b < tier.block_count(); ++b) {
    const bs::BlockImage& image = tier.image(bs::block_at(b));
    CHECK(bs::validate(image) == std::nullopt);
    CHECK(slot_of(tier, bs::block_at(b)) == slot_of(plain, bs::block_at(b)));
    CHECK(tier.locate(bs::block_at(b), 0).find("block " + std::to_string(b)) != std::string::npos);
  }
}

TEMPLATE_TEST_CASE("b41 files of every awkward size are read past the page cache to their very end",
                   "", OverRing, OverShallowRing, WithoutRing, DirectPool) {
  const TemporaryFolder folder;
  for (const std::size_t size : {1U, 511U, 512U, 513U, 4095U, 4096U, 4864U, (1U << 20) + 1U}) {
    const auto path = folder.path() / std::to_string(size);
    write_bytes(path, pattern_bytes(size, 0, size));
    bs::AnyStorage tier = TestType::make(map_of(path, {{0, size}, {size - 1, 1}}));
    Bytes image = pattern_bytes(size, 0, size);
    image.resize(static_cast<std::size_t>(tier.image(bs::BlockId{0}).byte_count));
    Reads reads;
    reads.start(tier, bs::BlockId{0}, {0, image.size()});
    reads.check_all({image});
    CHECK(slot_of(tier, bs::BlockId{1}) == pattern_bytes(size, size - 1, 1));
  }
}

TEMPLATE_TEST_CASE("b43 a tail at a non-zero aligned offset is the tail of the file", "", OverRing,
                   WithoutRing, DirectPool) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "f";
  write_bytes(path, pattern_bytes(7, 0, 8192 + 4196));
  bs::AnyStorage tier = TestType::make(map_of(path, {{5, 3000}, {8192, 4196}}));
  CHECK(slot_of(tier, bs::BlockId{0}) == pattern_bytes(7, 5, 3000));
  CHECK(slot_of(tier, bs::BlockId{1}) == pattern_bytes(7, 8192, 4196));
}

TEMPLATE_TEST_CASE("b41 a file cut after opening is an error past the page cache, and never a lie",
                   "", OverRing, OverShallowRing, WithoutRing, DirectPool) {
  const PatternFiles files{512};
  bs::AnyStorage tier = TestType::make(files.map);
  const std::uint64_t last = files.images[4].size();
  for (const std::uintmax_t kept : {400'000U, 399'999U, 300'000U, 4096U, 0U}) {
    std::filesystem::resize_file(files.files[2], kept);
    CHECK(read_error(tier, bs::BlockId{4}, {last - 512, 512}) == bs::FileErrc::shrank);
    CHECK(read_error(tier, bs::BlockId{4}, {0, last}) == bs::FileErrc::shrank);
  }
  Reads untouched;
  untouched.start(tier, bs::BlockId{1}, {0, files.images[1].size()});
  untouched.check_all(files.images);
}

TEMPLATE_TEST_CASE("a file cut while many direct reads run fails them or not but never lies", "",
                   OverRing, OverShallowRing, WithoutRing, DirectPool) {
  const PatternFiles files{512};
  bs::AnyStorage tier = TestType::make(files.map);
  const std::uint64_t begin = files.map.blocks()[4].extents[0].file_offset;
  Reads reads;
  for (std::uint64_t i = 0; i < 200; ++i) {
    reads.start(tier, bs::BlockId{4}, {i * 1024, 65'536});
    if (i == 100) std::filesystem::resize_file(files.files[2], 200'000);
  }
  reads.wait();
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const auto& read = reads[i];
    REQUIRE(read.calls == 1);
    if (read.error) {
      REQUIRE(begin + read.range.end() > 200'000);
      REQUIRE(read.error == bs::FileErrc::shrank);
    } else {
      REQUIRE(read.buffer.holds(pattern_bytes(2, begin + read.range.offset, 65'536)));
    }
  }
  REQUIRE(reads[199].error == bs::FileErrc::shrank);
}

TEMPLATE_TEST_CASE("a file that is replaced or deleted goes on being read directly as it was", "",
                   OverRing, WithoutRing, DirectPool) {
  const PatternFiles files{4096};
  bs::AnyStorage tier = TestType::make(files.map);
  std::filesystem::remove(files.files[0]);
  std::filesystem::rename(files.files[1], files.folder.path() / "elsewhere");
  write_bytes(files.files[1], pattern_bytes(99, 0, 5000));
  check_whole_images(tier, files.images);
}

TEMPLATE_TEST_CASE("b64 a file missing or too short at opening is named", "", OverRing, WithoutRing,
                   DirectPool) {
  const PatternFiles files{512};
  std::filesystem::resize_file(files.files[2], 400'000);
  try {
    const bs::AnyStorage tier = TestType::make(files.map);
    FAIL("opened");
  } catch (const bs::StorageError& error) {
    const std::string what = error.what();
    CHECK(what.find("part 2.bin") != std::string::npos);
    CHECK(what.find("400000") != std::string::npos);
  }
  std::filesystem::remove(files.files[1]);
  CHECK_THROWS_AS(TestType::make(files.map), bs::StorageError);
}

TEMPLATE_TEST_CASE("b54 a direct tier destroyed with reads in flight writes nothing afterwards", "",
                   OverRing, OverShallowRing, WithoutRing, DirectPool) {
  const PatternFiles files{512};
  for (std::uint32_t round = 0; round < 20; ++round) {
    Reads reads;
    {
      bs::AnyStorage tier = TestType::make(files.map);
      start_random_reads(reads, tier, 32, round);
    }
    REQUIRE(reads.ended() == 32);
    reads.check_all(files.images);
  }
}

TEMPLATE_TEST_CASE("b55 direct offsets beyond 4 GiB, holes and images beyond 2 GiB", "", OverRing,
                   WithoutRing, DirectPool) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "sparse";
  write_bytes(path, {});
  constexpr std::uint64_t gib = std::uint64_t{1} << 30;
  std::filesystem::resize_file(path, 5 * gib);
  const std::vector<std::uint64_t> marks{0, 2 * gib - 3, 4 * gib + 7, 5 * gib - 8};
  {
    std::fstream out{path, std::ios::binary | std::ios::in | std::ios::out};
    for (const std::uint64_t mark : marks) {
      const Bytes bytes = pattern_bytes(mark, 0, 8);
      out.seekp(static_cast<std::streamoff>(mark));
      out.write(reinterpret_cast<const char*>(bytes.data()), 8);
    }
    REQUIRE(out.good());
  }
  bs::AnyStorage tier = TestType::make(map_of(path, {{0, 5 * gib}}));
  REQUIRE(tier.image(bs::BlockId{0}).byte_count == 5 * gib);
  for (const std::uint64_t mark : marks) {
    Reads reads;
    const std::uint64_t begin = mark / 4096 * 4096;
    const std::uint64_t count = std::min<std::uint64_t>(8192, 5 * gib - begin);
    auto& read = reads.start(tier, bs::BlockId{0}, {begin, count});
    reads.wait();
    REQUIRE(read.error == std::error_code{});
    const auto found = read.buffer.span().subspan(mark - begin, 8);
    CHECK(std::ranges::equal(found, pattern_bytes(mark, 0, 8)));
    CHECK(std::ranges::count(read.buffer.span(), std::byte{0}) >= static_cast<long>(count) - 8);
  }
}

TEST_CASE("b63 what is said of the page cache is what the descriptors do") {
  const PatternFiles files{512};
  const bs::UringStorage direct{files.map};
  bs::UringStorageOptions options;
  options.access = bs::FileAccess::cached;
  const bs::UringStorage cached{files.map, options};
  const PatternFiles in_memory{1, "/dev/shm"};
  const bs::UringStorage memory{in_memory.map};
  CHECK(cached.describe().find("page cache (part 0.bin: not asked for)") != std::string::npos);
  CHECK(memory.describe().find("the file lies in memory") != std::string::npos);
  CHECK(memory.image(bs::BlockId{0}).read_granularity == 1);
  if (direct.describe().find("O_DIRECT, ") == std::string::npos) {
    WARN("the folder for temporary files has no O_DIRECT: " << direct.describe());
  }
  const bs::FileStorage pool{files.map, {2, bs::FileAccess::direct}};
  CHECK((pool.describe().find("O_DIRECT, ") == 0) == pool.reader().sources()[0].direct());
  CHECK_FALSE(bs::FileStorage{files.map}.reader().sources()[0].direct());
}

TEST_CASE("bytes read beyond those needed are two blocks of the file system a range at most") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "f";
  write_bytes(path, pattern_bytes(1, 0, 1'000'000));
  const bs::UringStorage tier{map_of(path, {{777, 600'003}}, 1)};
  const std::uint64_t read = tier.image(bs::BlockId{0}).byte_count;
  CHECK(read >= 600'003);
  CHECK(static_cast<double>(read) / 600'003 <= 1.02);
}

TEST_CASE("tiers share a ring, and the end of one does not disturb the others") {
  bs::UringRuntime runtime{small_requests(3)};
  const PatternFiles files{512};
  bs::UringStorage stays{runtime, files.map};
  for (std::uint32_t round = 0; round < 20; ++round) {
    Reads reads;
    Reads others;
    start_random_reads(others, stays, 10, round);
    {
      bs::UringStorage goes{runtime, files.map};
      start_random_reads(reads, goes, 10, round + 100);
    }
    REQUIRE(reads.ended() == 10);
    reads.check_all(files.images);
    others.check_all(files.images);
  }
}

TEST_CASE("b51 64 tiers with a ring each work or fall back one by one") {
  const PatternFiles files{512};
  std::vector<bs::UringStorage> tiers;
  for (int i = 0; i < 64; ++i) tiers.emplace_back(files.map);
  for (bs::UringStorage& tier : tiers) check_whole_images(tier, files.images);
}

TEST_CASE("reads from many threads, some of them inside completions, all end") {
  const PatternFiles files{512};
  bs::UringRuntime runtime{small_requests(2)};
  std::atomic<int> ended{0};
  std::vector<Buffer> buffers;
  for (int i = 0; i < 64; ++i) buffers.emplace_back(files.images[1].size());
  {
    bs::UringStorage tier{runtime, files.map};
    const bs::ByteRange whole{0, files.images[1].size()};
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = 0; i < 8; ++i) {
          const std::size_t at = (t * 8 + i) * 2;
          tier.async_read(bs::BlockId{1}, whole, buffers[at].span(),
                          [&, at](std::error_code, std::size_t) {
                            tier.async_read(bs::BlockId{1}, whole, buffers[at + 1].span(),
                                            [&](std::error_code, std::size_t) { ++ended; });
                          });
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    while (ended < 32) std::this_thread::yield();
  }
  CHECK(ended == 32);
  for (const Buffer& buffer : buffers) CHECK(buffer.holds(files.images[1]));
}

TEST_CASE("memory that is announced is read into all the same, pinned or not") {
  const PatternFiles files{512};
  bs::UringRuntime runtime;
  bs::AnyStorage tier{bs::UringStorage{runtime, files.map}};
  Buffer memory{1U << 20};
  for (int round = 0; round < 3; ++round) {
    tier.prepare(memory.span());
    const auto out = memory.span().subspan(8192, files.images[1].size());
    std::ranges::fill(out, poison);
    std::atomic<bool> ended{false};
    Reads reads;
    tier.async_read(bs::BlockId{1}, {0, out.size()}, out,
                    [&](std::error_code error, std::size_t) { ended = !error; });
    check_whole_images(tier, files.images);  // elsewhere; ends after it, mostly
    while (!ended) std::this_thread::yield();
    CHECK(std::ranges::equal(out, files.images[1]));
    tier.forget(memory.span());
    CHECK(runtime.report().fixed_byte_count == 0);
  }
  CHECK(memory.guards_intact());
}

TEST_CASE("a refused ring says why, what would help and what is used instead") {
  const PatternFiles files{512};
  bs::UringRuntime runtime{{}, refuse};
  CHECK_FALSE(runtime.running());
  const bs::UringStorage tier{runtime, files.map};
  CHECK_FALSE(tier.uses_ring());
  const std::string text = tier.describe();
  CHECK(text.find("thread pool") == 0);
  CHECK(text.find("Operation not permitted") != std::string::npos);
  CHECK(text.find("seccomp") != std::string::npos);
}
