// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/pipeline/fetch_machine.hpp>
#include <block_streamer/pipeline/options.hpp>
#include <block_streamer/pipeline/transfers.hpp>
#include <block_streamer/plan/read_plan.hpp>
#include <block_streamer/storage/any_storage.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief What follows from tier, backend and options once and for all: how bytes travel, how many
/// slots there are and how large, and the reads of every block.
class PipelineShape {
 public:
  /// @param registrations  receives the page-locks of the tier's memory, if it is used from there.
  /// @throws Error naming the block if one needs more than the slot budget.
  template <execution_backend Backend>
  PipelineShape(const AnyStorage& storage, Backend& backend, const PipelineOptions& options,
                std::vector<typename Backend::HostRegistration>& registrations) {
    check(options);
    expects(storage.block_count() > 0, "there must be at least one block to stream");
    mode = choose_mode(storage, backend, registrations);
    plan_blocks(storage, options);
    const auto blocks = static_cast<std::uint32_t>(storage.block_count());
    prefetch_ahead = std::min(options.prefetch_ahead, blocks - 1);
    const std::uint64_t stride =
        std::max<std::uint64_t>(round_up(transfer.slot_byte_count, tensor_alignment), 1);
    const std::uint64_t cached = std::min<std::uint64_t>(options.device_budget / stride, blocks);
    transfer.slot_count = std::min(blocks, prefetch_ahead + 1 + static_cast<std::uint32_t>(cached));
    count_tickets(options);
  }

  struct Reads : ReadPlan {
    std::uint64_t slot_byte_count = 0;
  };
  [[nodiscard]] const Reads& reads_of(PartId part) const noexcept {
    return reads_[index_of(part.block)];
  }

  FetchMode mode = FetchMode::staged;
  std::uint32_t prefetch_ahead = 0;  ///< as asked, but less than the number of blocks
  TransferShape transfer;

 private:
  template <execution_backend Backend>
  static FetchMode choose_mode(const AnyStorage& storage, Backend& backend,
                               std::vector<typename Backend::HostRegistration>& registrations) {
    if (storage.addressable() && lock_regions(storage, backend, registrations))
      return FetchMode::addressed;
    bool any_alignment = true;
    for (std::size_t b = 0; b < storage.block_count(); ++b) {
      any_alignment = any_alignment && storage.image(block_at(b)).read_granularity == 1;
    }
    return backend.host_addressable() && any_alignment ? FetchMode::in_place : FetchMode::staged;
  }
  /// All regions or none: where one is refused, the tier is read like any other.
  template <execution_backend Backend>
  static bool lock_regions(const AnyStorage& storage, Backend& backend,
                           std::vector<typename Backend::HostRegistration>& registrations) {
    for (const std::span<std::byte> region : storage.regions()) {
      if (region.empty()) continue;
      auto registration = backend.register_host(region);
      if (!registration) {
        registrations.clear();
        return false;
      }
      registrations.push_back(std::move(*registration));
    }
    return true;
  }

  void plan_blocks(const AnyStorage& storage, const PipelineOptions& options) {
    for (std::size_t b = 0; b < storage.block_count(); ++b) {
      const BlockImage& image = storage.image(block_at(b));
      Reads reads{
          mode == FetchMode::staged
              ? plan_staged_reads(image, 0,
                                  std::min(options.chunk_byte_count,
                                           std::max<std::uint64_t>(options.staging_byte_count, 1)))
              : plan_direct_reads(image, 0,
                                  mode == FetchMode::in_place
                                      ? options.chunk_byte_count
                                      : std::max<std::uint64_t>(image.byte_count, 1)),
          image.layout.slot_byte_count[0]};
      if (options.slot_byte_budget && reads.slot_byte_count > *options.slot_byte_budget) {
        throw Error{to_string(PartId{block_at(b)}) + " needs a slot of " +
                    std::to_string(reads.slot_byte_count) + " bytes, the budget is " +
                    std::to_string(*options.slot_byte_budget)};
      }
      transfer.slot_byte_count = std::max(transfer.slot_byte_count, reads.slot_byte_count);
      reads_.push_back(std::move(reads));
    }
  }
  void count_tickets(const PipelineOptions& options) {
    std::uint64_t largest = 1, chunks = 1;
    for (const Reads& reads : reads_) {
      chunks += reads.chunks.size();
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
