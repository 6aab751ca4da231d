// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/trace/row_reads.hpp>
#include <block_streamer/trace/statistics.hpp>

#include <optional>

namespace block_streamer_cli {

/// What embedding and head have cost where they are not resident; empty where they are.
struct VocabularyReport {
  std::optional<block_streamer::Statistics> head;
  std::optional<block_streamer::RowReads> embedding;
};

/// @brief Blocks and the head's slices together. A pass is one over the blocks; both sets of slots
/// are there at once, so the peaks add up.
[[nodiscard]] inline block_streamer::Statistics with_head(block_streamer::Statistics all,
                                                          const block_streamer::Statistics& head) {
  all.visits += head.visits;
  all.fetches += head.fetches;
  all.bytes_needed += head.bytes_needed;
  all.bytes_read += head.bytes_read;
  all.bytes_copied += head.bytes_copied;
  all.bytes_copied_out += head.bytes_copied_out;
  all.bytes_converted += head.bytes_converted;
  all.resident_blocks += head.resident_blocks;
  all.resident_bytes += head.resident_bytes;
  all.peak_resident_blocks += head.peak_resident_blocks;
  all.peak_resident_bytes += head.peak_resident_bytes;
  all.bound_bytes += head.bound_bytes;
  all.storage_wait_s += head.storage_wait_s;
  all.device_wait_s += head.device_wait_s;
  return all;
}

}  // namespace block_streamer_cli
