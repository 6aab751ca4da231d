// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/dtype.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/pipeline/activation_options.hpp>
#include <block_streamer/plan/pass_costs.hpp>
#include <block_streamer/trace/residency_observer.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <cstdint>
#include <optional>

namespace block_streamer::inline v1 {

/// How a pipeline moves blocks. Sizes are in bytes.
struct PipelineOptions {
  /// Blocks on their way while one computes; at most this many + 1 are resident, plus what
  /// device_budget caches. 0 works.
  std::uint32_t prefetch_ahead = 1;
  /// Device memory for blocks that stay between visits, on top of the prefetch_ahead + 1 slots. 0:
  /// none; less than the smallest block's slot is refused.
  std::uint64_t device_budget = 0;
  /// What blocks cost, for a plan whose passes take the least time; nullopt: the fewest fetches.
  std::optional<PassCosts> costs{};
  /// Largest slot allowed; a block that needs more is refused before anything is allocated.
  std::optional<std::uint64_t> slot_byte_budget{};
  /// Size of one read, and of one copy out of staging: each costs the processor some 40 µs in
  /// wake-ups and calls, whatever its size. @see UringStorage::chunk_byte_count for a drive.
  std::uint64_t chunk_byte_count = std::uint64_t{4} << 20;
  /// Page-locked memory between storage and device. Unused where tiers are read in place or are in
  /// RAM.
  std::uint64_t staging_byte_count = std::uint64_t{64} << 20;
  /// Reads in flight where no staging limits them (slots that are host memory).
  std::uint32_t reads_in_flight = 8;
  /// Fetch the first blocks of the expected next pass before this one ends.
  bool prefetch_next_pass = true;
  /// What floating weights are computed in; nullopt: as stored. Read by Streamer, which then
  /// converts at every visit.
  std::optional<DType> dtype{};
  /// Where the inputs of blocks wait for a backward. Read by Streamer.
  ActivationOptions activations{};
  /// The visitor's own thread computes on the slots, so a visit waits on the host until its bytes
  /// are there (host backends).
  bool computes_on_host = false;
  TraceSinkRef trace{};
  ResidencyObserverRef observer{};
};

/// @throws ContractViolation naming the option that is out of range.
inline void check(const PipelineOptions& options) {
  constexpr std::uint64_t most_staging = std::uint64_t{256} << 20;
  expects(options.prefetch_ahead < (1U << 20), "prefetch_ahead is out of range");
  expects(options.chunk_byte_count > 0, "chunk_byte_count must be positive");
  expects(options.staging_byte_count <= most_staging, "staging_byte_count must not exceed 256 MiB");
  expects(options.reads_in_flight > 0, "reads_in_flight must be positive");
}

}  // namespace block_streamer::inline v1
