// SPDX-License-Identifier: Apache-2.0
// Where blocks wait for their turn.
#pragma once

#include "console.hpp"

#include <block_streamer/architecture/model_summary.hpp>
#include <block_streamer/block/dtype_finisher.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/os/limits.hpp>
#include <block_streamer/pipeline/transfers.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/storage/tiered_storage.hpp>
#include <block_streamer/storage/uring_storage.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_cli {

struct StorageChoice {
  std::string tier;              ///< ram, tiered, mmap, file or io_uring
  std::uint64_t ram_budget = 0;  ///< of tiered, in bytes
};

/// @brief Resolves auto, and says which and why.
/// @param ram_budget  what tiered may fill, if the caller said so. @param type  what the weights
/// become; they are kept so in memory, but for tiered, which keeps them as stored.
/// @throws Error if it is to be tiered and how much may be filled is not known.
[[nodiscard]] inline StorageChoice choose_storage(const std::string& wanted,
                                                  std::optional<std::uint64_t> ram_budget,
                                                  const block_streamer::ModelSummary& summary,
                                                  block_streamer::DType type) {
  const bool tiered = wanted == "tiered" || (wanted == "auto" && ram_budget);
  if (ram_budget) {
    const auto available = block_streamer::available_memory();
    if (available && *ram_budget > *available && summary.streamed.byte_count > *available) {
      say("warning: --ram-budget " + readable_bytes(*ram_budget) + " exceeds the " +
          readable_bytes(*available) + " that are available");
    }
    return {"tiered", *ram_budget};
  }
  if (wanted == "pinned") return {"ram"};
  if (wanted != "auto" && !tiered) return {wanted};
  const std::uint64_t parameters =
      summary.streamed.parameter_count + summary.resident.parameter_count;
  const std::uint64_t needed = parameters * block_streamer::byte_count_of(type);
  const auto available = block_streamer::available_memory();
  if (!available && tiered) {
    throw block_streamer::Error{
        "how much memory is available is not known: --storage tiered needs a --ram-budget"};
  }
  if (!available) {
    say("storage: io_uring (auto: how much memory is available is not known)");
    return {"io_uring"};
  }
  const std::uint64_t fillable = block_streamer::fillable_memory(*available);
  const std::uint64_t resident =
      summary.resident.parameter_count * block_streamer::byte_count_of(type);
  const std::uint64_t for_blocks = fillable - std::min(fillable, resident);
  if (tiered) return {"tiered", for_blocks};
  const bool fits = needed <= fillable;
  const bool some = for_blocks >= summary.largest_block_byte_count;
  const std::string tier = fits ? "ram" : some ? "tiered" : "io_uring";
  say("storage: " + tier + " (auto: the model takes " + readable_bytes(needed) + ", " +
      (fits ? "" : "only ") + readable_bytes(fillable) + " of memory may be filled)");
  return {tier, tier == "tiered" ? for_blocks : 0};
}

namespace detail {

/// Reads one block as it lies in a slot.
inline void read_slot(const block_streamer::ExtentReader<block_streamer::PositionalFile>& reader,
                      block_streamer::BlockId block, std::span<std::byte> slot) {
  for (const block_streamer::Segment& segment : reader.image(block).segments) {
    const auto out = slot.subspan(static_cast<std::size_t>(segment.slot_offset),
                                  static_cast<std::size_t>(segment.byte_count));
    const block_streamer::ByteRange range{segment.image_offset, segment.byte_count};
    if (const std::error_code error = reader.read(block, range, out)) {
      throw block_streamer::StorageError{reader.locate(block, segment.image_offset),
                                         "cannot read " + std::to_string(out.size()) + " bytes",
                                         error};
    }
  }
}

/// The blocks in memory in the type that they compute in, so that no visit converts.
[[nodiscard]] inline block_streamer::RamStorage converted_ram(block_streamer::BlockMap map,
                                                              block_streamer::DType type) {
  namespace bs = block_streamer;
  const bs::ExtentReader<bs::PositionalFile> reader{std::move(map)};
  std::vector<bs::BlockLayout> layouts;
  std::uint64_t largest = 0;
  for (const bs::BlockSource& source : reader.block_map().blocks()) {
    layouts.push_back(bs::bound_layout(source.image.layout, type));
    largest = std::max(largest, source.image.layout.slot_byte_count.front());
  }
  bs::RamStorage ram{layouts};
  bs::HostBackend backend;  // for aligned memory
  const auto buffer = backend.allocate_device(static_cast<std::size_t>(largest));
  const std::span<std::byte> wire = backend.bytes(buffer);
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const bs::BlockId block = bs::block_at(i);
    read_slot(reader, block, wire);
    bs::convert_block(wire, reader.image(block).layout, ram.writable_bytes(block), layouts[i],
                      at::Device{at::kCPU});
  }
  return ram;
}

}  // namespace detail

/// @brief A budget that holds no block would silently do nothing.
/// @param budget  --device-budget in bytes; 0: none asked for.
/// @throws Error naming the size of the smallest block, as it lies on the device.
inline void expect_budget_holds_a_block(std::uint64_t budget, const std::string& tier,
                                        const block_streamer::BlockMap& map,
                                        block_streamer::DType type) {
  namespace bs = block_streamer;
  if (budget == 0) return;
  std::uint64_t smallest = ~std::uint64_t{0};
  for (const bs::BlockSource& source : map.blocks()) {
    const bs::BlockLayout& stored = source.image.layout;
    const bs::BlockLayout layout = tier == "ram" ? bs::bound_layout(stored, type) : stored;
    const std::uint64_t slot = layout.slot_byte_count.front();
    smallest = std::min(smallest, bs::round_up(slot, bs::tensor_alignment));
  }
  if (budget >= smallest) return;
  throw bs::Error{"--device-budget " + std::to_string(budget) +
                  " bytes hold no block: the smallest takes " + std::to_string(smallest) +
                  " bytes (" + readable_bytes(smallest) + ") on the device"};
}

/// @param tier  ram, mmap, file or io_uring. @param what  begins a line that says how it reads.
[[nodiscard]] inline block_streamer::AnyStorage make_storage(const std::string& tier,
                                                             block_streamer::BlockMap map,
                                                             block_streamer::DType type,
                                                             const std::string& what = "storage") {
  if (tier == "mmap") return block_streamer::MappedStorage{std::move(map)};
  if (tier == "file") return block_streamer::FileStorage{std::move(map)};
  if (tier == "io_uring") {
    block_streamer::UringStorage storage{std::move(map)};
    say(what + ": " + storage.describe());
    return block_streamer::AnyStorage{std::move(storage)};
  }
  for (const block_streamer::BlockSource& source : map.blocks()) {
    for (const block_streamer::TensorPlacement& tensor : source.image.layout.tensors) {
      if (tensor.spec.dtype != type) return detail::converted_ram(std::move(map), type);
    }
  }
  return block_streamer::RamStorage::load(std::move(map));
}

/// @brief Says how much of a tiered storage is in memory, and how much of that is page-locked.
inline void say_what_is_in_memory(const StorageChoice& choice,
                                  const block_streamer::TransferShape& shape,
                                  std::size_t block_count) {
  if (choice.tier != "tiered") return;
  const std::uint32_t kept = shape.memory_block_count;
  say("storage: tiered, " + (kept == block_count
                                 ? "all " + counted(block_count, "block") + " stay in memory"
                                 : std::to_string(kept) + " of " + counted(block_count, "block") +
                                       (kept == 1 ? " stays" : " stay") +
                                       " in memory, the others are streamed from files"));
  const std::uint32_t refused = shape.memory_block_count - shape.locked_block_count;
  if (refused > 0) {
    say("storage: " + std::to_string(refused) +
        " of those in memory could not be page-locked: they are copied through staging");
  }
}

/// @brief Says what became of --device-budget, which may be larger than all blocks.
/// @param budget  in bytes; 0: none asked for.
inline void say_what_stays_on_the_device(std::uint64_t budget,
                                         const block_streamer::TransferShape& shape,
                                         std::size_t block_count) {
  if (budget == 0) return;
  std::uint64_t bytes = 0;
  for (const std::uint64_t slot : shape.slot_byte_counts) bytes += slot;
  say("device: slots for " +
      (shape.slot_count == block_count
           ? "all " + counted(block_count, "block")
           : std::to_string(shape.slot_count) + " of " + counted(block_count, "block")) +
      ", " + readable_bytes(bytes) + " with --device-budget " + readable_bytes(budget));
}

}  // namespace block_streamer_cli
