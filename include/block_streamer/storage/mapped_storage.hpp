// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/io/worker_threads.hpp>
#include <block_streamer/os/file_mapping.hpp>
#include <block_streamer/storage/extent_reader.hpp>
#include <block_streamer/storage/pooled.hpp>
#include <block_streamer/storage/read_contract.hpp>
#include <block_streamer/storage/read_threads.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

struct MappedStorageOptions {
  /// Copies, and so page faults, under way at once.
  std::size_t threads = default_read_threads();
  /// What the system is told of the mappings: how it reads around a fault that nothing announced.
  MappingAdvice advice = MappingAdvice::normal;
  /// Announce every accepted read to the system at once, so that the drive works on all of them
  /// while the first is copied. What is accepted is what the plan wants next, so nothing is read
  /// that is not needed, and never more than the reader of the tier has room for.
  bool read_ahead = true;
  /// Let go of pages that were copied: they leave this process's memory and may stay in the page
  /// cache.
  bool drop_passed = true;
};

/// A file read by copying out of a read-only mapping.
class MappedFile {
 public:
  [[nodiscard]] static MappedFile open(const std::filesystem::path& path) {
    return open(path, MappedStorageOptions{});
  }
  [[nodiscard]] static MappedFile open(const std::filesystem::path& path,
                                       const MappedStorageOptions& options) {
    MappedFile file{FileMapping{path}, options.drop_passed};
    file.mapping_.expect(options.advice);
    return file;
  }
  [[nodiscard]] std::uint64_t size() const noexcept { return mapping_.size(); }
  [[nodiscard]] std::error_code read_at(std::uint64_t offset, std::span<std::byte> out) const {
    const std::error_code error = mapping_.copy_out(offset, out);
    if (drop_passed_) {
      // A fault maps its surroundings as well. Others may still copy from there: that costs them a
      // fault without a read, since the pages are in the page cache.
      const std::uint64_t begin = offset - std::min(offset, fault_around);
      mapping_.drop_pages({begin, offset + out.size() + fault_around - begin});
    }
    return error;
  }
  void will_need(ByteRange range) const noexcept { mapping_.will_need(range); }

 private:
  MappedFile(FileMapping mapping, bool drop_passed) noexcept
      : mapping_{std::move(mapping)}, drop_passed_{drop_passed} {}

  static constexpr std::uint64_t fault_around = 65'536;  // of most systems

  FileMapping mapping_;
  bool drop_passed_;
};
static_assert(file_source<MappedFile>);

/// @brief A checkpoint's files, mapped read-only, for files that are in the page cache or fit into
/// it: their pages take no private memory and are shared with other processes. Page faults, which
/// block, happen on the pool's threads and announcements on one of their own: never on the caller's
/// or the I/O loop's. Not addressable, on purpose: a page of a file on another machine can fail at
/// any touch, and registering mappings with a device has unsettled whole systems.
/// **Errors.** A file that shrank or whose page cannot be served is an error, not a signal.
/// **Threads.** As Pooled.
/// **Cost.** Each byte is copied once. Resident memory: what is being copied at the moment.
class MappedStorage {
 public:
  using Reader = ExtentReader<MappedFile>;

  /// @throws StorageError if a file cannot be mapped or ends before bytes that a block needs, or
  /// the system refuses a thread.
  explicit MappedStorage(BlockMap map, MappedStorageOptions options)
      : state_{std::make_unique<State>(open(std::move(map), options), options)} {}
  /// @param threads copies, and so page faults, under way at once.
  explicit MappedStorage(BlockMap map, std::size_t threads = default_read_threads())
      : MappedStorage{std::move(map), with_threads(threads)} {}

  [[nodiscard]] std::size_t block_count() const noexcept { return state_->pool.block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return state_->pool.image(block);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    if (state_->announcer && !check_read(reader(), block, range, out)) {
      state_->announcer->announce(block, range);
    }
    state_->pool.async_read(block, range, out, std::move(done));
  }
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    return state_->pool.locate(block, image_offset);
  }
  [[nodiscard]] const Reader& reader() const noexcept { return state_->pool.reader(); }

 private:
  /// Tells the system what will be read. Telling may block, so it has a thread of its own.
  class Announcer {
   public:
    explicit Announcer(const Reader& reader) : reader_{reader} {}
    Announcer(const Announcer&) = delete;
    Announcer& operator=(const Announcer&) = delete;
    ~Announcer() { thread_.stop(); }  // a hint that nobody waits for
    void announce(BlockId block, ByteRange range) noexcept {
      thread_.post([this, block, range]() noexcept {
        const auto& extents = reader_.block_map().blocks()[index_of(block)].extents;
        for (const Extent& e : extents) {
          const std::uint64_t begin = std::max(range.offset, e.image_offset);
          const std::uint64_t end = std::min(range.end(), e.image_offset + e.byte_count);
          if (begin >= end) continue;
          reader_.sources()[e.file].will_need(
              {e.file_offset + (begin - e.image_offset), end - begin});
        }
      });
    }

   private:
    const Reader& reader_;
    WorkerThreads thread_{1};
  };

  struct State {
    State(Reader reader, const MappedStorageOptions& options)
        : pool{std::move(reader), options.threads} {
      if (options.read_ahead) announcer.emplace(pool.reader());
    }
    Pooled<Reader> pool;
    std::optional<Announcer> announcer;
  };

  static MappedStorageOptions with_threads(std::size_t threads) {
    MappedStorageOptions options;
    options.threads = threads;
    return options;
  }
  static Reader open(BlockMap map, const MappedStorageOptions& options) {
    std::vector<MappedFile> files;
    files.reserve(map.files().size());
    for (const std::filesystem::path& path : map.files()) {
      files.push_back(MappedFile::open(path, options));
    }
    return {std::move(map), std::move(files)};
  }

  std::unique_ptr<State> state_;
};
static_assert(locating_tier<MappedStorage> && !addressable_tier<MappedStorage>);

}  // namespace block_streamer::inline v1
