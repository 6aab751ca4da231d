// SPDX-License-Identifier: Apache-2.0
// The tiers over files, each made from the same block map; and a pipeline that streams one.
#pragma once

#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/storage/tiered_storage.hpp>
#include <block_streamer/storage/uring_storage.hpp>

#include <storage/pattern_files.hpp>
#include <support/catch.hpp>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::testing_support {

struct TierOverFiles {
  std::string name;
  std::function<AnyStorage(const BlockMap&)> make;
  bool reads_files_once = false;  ///< when it is made; what becomes of them later is no matter
};

/// Every other block in memory.
[[nodiscard]] inline AnyStorage half_in_memory(AnyStorage below) {
  std::vector<std::uint8_t> in_memory;
  for (std::size_t b = 0; b < below.block_count(); ++b) in_memory.push_back(b % 2 == 0 ? 1 : 0);
  return TieredStorage{std::move(below), std::move(in_memory)};
}

[[nodiscard]] inline std::vector<TierOverFiles> every_tier() {
  const auto ring = [](const BlockMap& map, FileAccess access) {
    UringStorageOptions options;
    options.access = access;
    return UringStorage{map, options};
  };
  return {
      {"ram", [](const BlockMap& map) { return RamStorage::load(map, 2); }, true},
      {"mmap",
       [](const BlockMap& map) {
         return MappedStorage{map, 2};
       }},
      {"file",
       [](const BlockMap& map) {
         return FileStorage{map, 2};
       }},
      {"file_direct",
       [](const BlockMap& map) {
         return FileStorage{map, {2, FileAccess::direct}};
       }},
      {"io_uring", [ring](const BlockMap& map) { return ring(map, FileAccess::direct); }},
      {"io_uring_cached", [ring](const BlockMap& map) { return ring(map, FileAccess::cached); }},
      {"tiered_file",
       [](const BlockMap& map) {
         return half_in_memory(FileStorage{map, 2});
       }},
      {"tiered_io_uring", [](const BlockMap& map) { return half_in_memory(UringStorage{map}); }},
  };
}

/// A tier, streamed in small chunks to a device with memory of its own.
class Streamed {
 public:
  explicit Streamed(AnyStorage tier, PipelineOptions options = small_chunks())
      : pipeline_{std::move(tier), backend_, options} {}

  [[nodiscard]] static PipelineOptions small_chunks() {
    PipelineOptions options;
    options.chunk_byte_count = 65'536;
    options.staging_byte_count = 4 * 65'536;
    return options;
  }

  /// One pass over all blocks. @param check  (lease, number of the block): how much was wrong.
  template <class Check>
  std::size_t pass(Check check) {
    std::size_t wrong = 0;
    const VisitOrder order = ascending(0, pipeline_.storage().block_count());
    auto pass = pipeline_.begin_pass(order, order, compute_);
    for (std::size_t b = 0; !pass.done(); ++b) {
      const auto lease = pass.acquire();
      backend_.record(passed_, compute_);
      backend_.synchronize(passed_);  // the copies were waited for by the compute stream
      wrong += check(lease.bytes(), b);
    }
    return wrong;
  }
  /// @returns how many segments had other bytes than the map's images, whatever the tier's
  /// rounding.
  std::size_t pass(const BlockMap& map, const Images& images) {
    return pass([&](std::span<const std::byte> slot, std::size_t b) {
      return static_cast<std::size_t>(
          std::ranges::count_if(map.blocks()[b].image.segments, [&](const Segment& s) {
            const auto from = std::span{images[b]}.subspan(s.image_offset, s.byte_count);
            return !std::ranges::equal(slot.subspan(s.slot_offset, s.byte_count), from);
          }));
    });
  }
  std::size_t pass(const PatternFiles& files) { return pass(files.map, files.images); }
  [[nodiscard]] auto& pipeline() noexcept { return pipeline_; }

 private:
  HostBackend backend_{HostMode::detached};
  HostBackend::Stream compute_ = backend_.make_stream();
  HostBackend::Event passed_ = backend_.make_event();
  BlockPipeline<HostBackend> pipeline_;
};

/// Three passes; in front of the last one staging goes and comes again.
inline void check_streamed(AnyStorage tier, const PatternFiles& files) {
  Streamed streamed{std::move(tier)};
  for (int round = 0; round < 3; ++round) {
    if (round == 2) streamed.pipeline().close();
    REQUIRE(streamed.pass(files) == 0);
  }
}

}  // namespace block_streamer::testing_support
