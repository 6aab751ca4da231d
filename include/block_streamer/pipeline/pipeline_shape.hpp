// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/os/limits.hpp>
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/pipeline/options.hpp>
#include <block_streamer/pipeline/transfers.hpp>
#include <block_streamer/plan/read_plan.hpp>
#include <block_streamer/plan/slot_sizes.hpp>
#include <block_streamer/plan/slot_space.hpp>
#include <block_streamer/storage/any_storage.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief What follows from tier, backend and options once and for all: how bytes travel, how many
/// slots there are and how large, and the reads of every block.
class PipelineShape {
 public:
  /// @param registrations  receives the page-locks of the tier's memory, if it is used from there.
  /// @throws Error naming the block if one needs more than the slot budget, and for budgets that
  /// hold no block or exceed the memory there is.
  template <execution_backend Backend>
  PipelineShape(const AnyStorage& storage, Backend& backend, const PipelineOptions& options,
                std::vector<typename Backend::HostRegistration>& registrations) {
    check(options);
    expects(storage.block_count() > 0, "there must be at least one block to stream");
    expects(!options.costs || options.costs->blocks.size() == storage.block_count(),
            "costs are given for every block");
    const std::vector<std::uint8_t> locked = lock_memory(storage, backend, options, registrations);
    mode = choose_mode(storage, backend, locked);
    plan_blocks(storage, options, locked);
    choose_slots(storage, options);
    count_tickets(options);
    if (backend.host_addressable()) check_memory(options);
  }

  struct Reads : ReadPlan {
    std::uint64_t slot_byte_count = 0;
  };
  [[nodiscard]] const Reads& reads_of(PartId part) const noexcept {
    return reads_[index_of(part.block)];
  }

  FetchMode mode = FetchMode::staged;
  std::uint32_t prefetch_ahead = 0;  ///< as asked, but less than the number of blocks
  SlotSpace space;                   ///< which block fits into which slot
  TransferShape transfer;

 private:
  template <execution_backend Backend>
  static FetchMode choose_mode(const AnyStorage& storage, Backend& backend,
                               const std::vector<std::uint8_t>& locked) {
    if (std::find(locked.begin(), locked.end(), 0) == locked.end()) return FetchMode::addressed;
    bool any_alignment = true;
    for (std::size_t b = 0; b < storage.block_count(); ++b) {
      any_alignment = any_alignment && storage.image(block_at(b)).read_granularity == 1;
    }
    return backend.host_addressable() && any_alignment ? FetchMode::in_place : FetchMode::staged;
  }
  /// Page-locks the tier's memory, as far as the system allows. Where it refuses, some is given
  /// back, so that staging, which serves all the rest, can be page-locked. @returns one flag per
  /// block: its image is in locked memory.
  template <execution_backend Backend>
  std::vector<std::uint8_t> lock_memory(
      const AnyStorage& storage, Backend& backend, const PipelineOptions& options,
      std::vector<typename Backend::HostRegistration>& registrations) {
    std::vector<std::span<const std::byte>> regions;
    for (const std::span<std::byte> region : storage.regions()) {
      if (region.empty()) continue;
      auto registration = backend.register_host(region);
      if (!registration) {
        for (std::uint64_t room = 0; !regions.empty() && room < options.staging_byte_count;) {
          room += regions.back().size();
          regions.pop_back();
          registrations.pop_back();
        }
        break;
      }
      registrations.push_back(std::move(*registration));
      regions.emplace_back(region);
    }
    std::vector<std::uint8_t> locked;
    for (std::size_t b = 0; b < storage.block_count(); ++b) {
      const bool there = storage.in_memory(block_at(b));
      locked.push_back(there && lies_in(regions, storage.bytes(block_at(b))) ? 1 : 0);
      transfer.memory_block_count += there ? 1 : 0;
      transfer.locked_block_count += locked.back();
    }
    return locked;
  }
  [[nodiscard]] static bool lies_in(const std::vector<std::span<const std::byte>>& regions,
                                    std::span<const std::byte> bytes) {
    const std::less_equal<> before;
    return bytes.empty() ||
           std::any_of(regions.begin(), regions.end(), [&](std::span<const std::byte> region) {
             return before(region.data(), bytes.data()) &&
                    before(bytes.data() + bytes.size(), region.data() + region.size());
           });
  }

  void plan_blocks(const AnyStorage& storage, const PipelineOptions& options,
                   const std::vector<std::uint8_t>& locked) {
    for (std::size_t b = 0; b < storage.block_count(); ++b) {
      const BlockImage& image = storage.image(block_at(b));
      Reads reads{plan_block(image, options, locked[b] != 0), image.layout.slot_byte_count[0]};
      if (options.slot_byte_budget && reads.slot_byte_count > *options.slot_byte_budget) {
        throw Error{to_string(PartId{block_at(b)}) + " needs a slot of " +
                    std::to_string(reads.slot_byte_count) + " bytes, the budget is " +
                    std::to_string(*options.slot_byte_budget)};
      }
      reads_.push_back(std::move(reads));
    }
  }
  [[nodiscard]] ReadPlan plan_block(const BlockImage& image, const PipelineOptions& options,
                                    bool locked) const {
    if (mode == FetchMode::in_place) return plan_direct_reads(image, 0, options.chunk_byte_count);
    if (locked) return plan_memory_copies(image, 0);
    const std::uint64_t staging = std::max<std::uint64_t>(options.staging_byte_count, 1);
    return plan_staged_reads(image, 0, std::min(options.chunk_byte_count, staging));
  }
  /// @throws Error if the budget for cached blocks holds none.
  void choose_slots(const AnyStorage& storage, const PipelineOptions& options) {
    std::vector<std::uint64_t> blocks;
    std::optional<std::uint64_t> least;  // a block without bytes is no use of a budget
    for (const Reads& reads : reads_) {
      const std::uint64_t size = round_up(reads.slot_byte_count, tensor_alignment);
      if (size > 0) least = std::min(size, least.value_or(size));
      blocks.push_back(std::max<std::uint64_t>(size, 1));
    }
    if (least && options.device_budget > 0 && options.device_budget < *least) {
      throw Error{"a device_budget of " + std::to_string(options.device_budget) +
                  " bytes caches no block: the smallest needs " + std::to_string(*least)};
    }
    prefetch_ahead =
        std::min(options.prefetch_ahead, static_cast<std::uint32_t>(storage.block_count()) - 1);
    transfer.slot_byte_counts = choose_slot_sizes(blocks, prefetch_ahead, options.device_budget);
    transfer.slot_count = static_cast<std::uint32_t>(transfer.slot_byte_counts.size());
    space = SlotSpace{transfer.slot_byte_counts, blocks};
    for (const Reads& reads : reads_)
      transfer.slot_byte_count = std::max(transfer.slot_byte_count, reads.slot_byte_count);
  }
  /// Memory that is not there would only show when it is touched, as a killed process.
  /// @throws Error
  void check_memory(const PipelineOptions& options) const {
    const auto available = available_memory();
    const std::uint64_t needed = std::accumulate(transfer.slot_byte_counts.begin(),
                                                 transfer.slot_byte_counts.end(), std::uint64_t{0});
    if (!available || needed <= *available) return;
    throw Error{std::to_string(transfer.slot_count) + " slots for blocks take " +
                std::to_string(needed) + " bytes, " + std::to_string(*available) +
                " are available: a prefetch_ahead smaller than " +
                std::to_string(options.prefetch_ahead) + " or a smaller device_budget takes less"};
  }
  void count_tickets(const PipelineOptions& options) {
    std::uint64_t largest = 1, chunks = 1;
    for (const Reads& reads : reads_) {
      chunks += reads.in_memory ? 1 : reads.chunks.size();
      if (reads.in_memory) continue;
      for (const Chunk& chunk : reads.chunks) largest = std::max(largest, chunk.image.byte_count);
    }
    if (mode == FetchMode::in_place) {
      transfer.ticket_count =
          static_cast<std::uint32_t>(std::min<std::uint64_t>(options.reads_in_flight, chunks));
    } else if (mode == FetchMode::addressed) {
      transfer.ticket_count = 1;
    } else {
      transfer.chunk_byte_count = largest;
      transfer.ticket_count = static_cast<std::uint32_t>(
          std::clamp<std::uint64_t>(options.staging_byte_count / largest, 1, chunks));
    }
  }

  std::vector<Reads> reads_;
};

}  // namespace block_streamer::inline v1
