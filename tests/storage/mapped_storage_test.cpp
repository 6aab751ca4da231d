// SPDX-License-Identifier: Apache-2.0
// MappedStorage: what it does to memory. What it delivers: file_storage_test.cpp.
#include <block_streamer/storage/mapped_storage.hpp>

#include <storage/pattern_files.hpp>
#include <support/catch.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <sstream>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

constexpr std::size_t file_size = std::size_t{24} << 20;
constexpr std::size_t chunk = std::size_t{1} << 20;

/// Bytes of `file` that are mapped into this process and resident; nullopt where it is not told.
std::optional<std::size_t> resident_bytes(const std::filesystem::path& file) {
  std::ifstream maps{"/proc/self/smaps"};
  std::string line;
  bool ours = false;
  std::optional<std::size_t> total;
  while (std::getline(maps, line)) {
    if (line.find('-') != std::string::npos && line.find(':') > line.find('-')) {
      ours = line.find(file.string()) != std::string::npos;
    } else if (ours && line.starts_with("Rss:")) {
      total = total.value_or(0) + std::stoul(line.substr(4)) * 1024;
    }
  }
  return total;
}

/// Pages of the file that are in the page cache.
std::size_t cached_pages(const std::filesystem::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY);
  void* const map = ::mmap(nullptr, file_size, PROT_READ, MAP_SHARED, descriptor, 0);
  std::vector<unsigned char> in_core(file_size / 4096);
  REQUIRE(::mincore(map, file_size, in_core.data()) == 0);
  ::munmap(map, file_size);
  ::close(descriptor);
  return static_cast<std::size_t>(
      std::ranges::count_if(in_core, [](unsigned char c) { return (c & 1) != 0; }));
}

void evict(const std::filesystem::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY);
  ::fdatasync(descriptor);
  ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  ::close(descriptor);
}

struct OneFile {
  OneFile() : path{folder.path() / "weights"} {
    write_bytes(path, pattern_bytes(1, 0, file_size));
    map = bs::BlockMap{{block_of({{0, {3, file_size - 10}}}, 1)}, {path}, {"b."}};
  }
  TemporaryFolder folder;
  std::filesystem::path path;
  bs::BlockMap map;
};

std::size_t largest_resident(bs::MappedStorage& tier, const OneFile& file) {
  std::size_t largest = 0;
  const std::uint64_t size = tier.image(bs::BlockId{0}).byte_count;
  for (std::uint64_t at = 0; at < size; at += chunk) {
    Reads reads;
    auto& read = reads.start(tier, bs::BlockId{0}, {at, std::min<std::uint64_t>(chunk, size - at)});
    reads.wait();
    REQUIRE(read.error == std::error_code{});
    REQUIRE(read.buffer.holds(pattern_bytes(1, 3 + at, read.range.byte_count)));
    largest = std::max(largest, resident_bytes(file.path).value_or(0));
  }
  return largest;
}

}  // namespace

TEST_CASE("b69 passed pages leave the process's memory and stay in the page cache") {
  const OneFile file;
  bs::MappedStorage tier{file.map};
  if (!resident_bytes(file.path)) {
    WARN("skipped: this system does not tell what is resident");
    return;
  }
  CHECK(largest_resident(tier, file) <= 256 * 1024);
  CHECK(cached_pages(file.path) >= file_size / 4096 - 1);
  CHECK(largest_resident(tier, file) <= 256 * 1024);  // a second pass is right as well

  bs::MappedStorageOptions keep;
  keep.drop_passed = false;
  bs::MappedStorage keeping{file.map, keep};
  CHECK(largest_resident(keeping, file) > file_size / 2);
}

TEST_CASE("b68 what is announced is what was asked for, not the whole file") {
  const OneFile file;
  evict(file.path);
  if (cached_pages(file.path) > 64) {
    WARN("skipped: the file does not leave the page cache");
    return;
  }
  {
    bs::MappedStorageOptions options;
    options.advice =
        bs::MappingAdvice::random;  // no reading around faults: what comes was announced
    options.threads = 1;
    bs::MappedStorage tier{file.map, options};
    CHECK(cached_pages(file.path) <= 64);  // opening reads nothing
    Reads reads;
    for (std::uint64_t i = 0; i < 3; ++i) reads.start(tier, bs::BlockId{0}, {i * chunk, chunk});
    reads.wait();
  }
  const std::size_t pages = cached_pages(file.path);
  CHECK(pages >= 3 * chunk / 4096);
  CHECK(pages <= 3 * chunk / 4096 + 512);
}

TEST_CASE("a read that waits for a thread is on its way from the drive already") {
  const OneFile file;
  evict(file.path);
  if (cached_pages(file.path) > 64) {
    WARN("skipped: the file does not leave the page cache");
    return;
  }
  bs::MappedStorageOptions options;
  options.advice = bs::MappingAdvice::random;
  options.threads = 1;
  bs::MappedStorage tier{file.map, options};
  std::mutex hold;
  hold.lock();
  Buffer first{4096};
  tier.async_read(bs::BlockId{0}, {0, 4096}, first.span(), [&](std::error_code, std::size_t) {
    const std::scoped_lock wait{hold};  // the pool's only thread
  });
  Reads reads;
  reads.start(tier, bs::BlockId{0}, {8 * chunk, chunk});
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  std::size_t pages = 0;
  while (pages < chunk / 4096 && std::chrono::steady_clock::now() < deadline) {
    pages = cached_pages(file.path);
  }
  CHECK(pages >= chunk / 4096);
  CHECK(reads.ended() == 0);
  hold.unlock();
  reads.wait();
}

TEST_CASE("every advice and neither announcing nor dropping changes no byte") {
  const PatternFiles files;
  for (const auto advice :
       {bs::MappingAdvice::normal, bs::MappingAdvice::sequential, bs::MappingAdvice::random}) {
    for (const bool on : {false, true}) {
      bs::MappedStorageOptions options;
      options.advice = advice;
      options.read_ahead = on;
      options.drop_passed = on;
      bs::MappedStorage tier{files.map, options};
      check_whole_images(tier, files.images);
      bs::MappedStorage other{files.map};
      other = std::move(tier);
      check_whole_images(other, files.images);
    }
  }
}
