// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>

namespace block_streamer_cli {

struct MergeJob {
  std::filesystem::path model;
  std::filesystem::path adapter;
  std::filesystem::path output;
  std::uint64_t shard_byte_count = 5'000'000'000;
  std::function<void(std::uint64_t, std::uint64_t)> progress{};  ///< bytes written, of all
};
struct MergeSummary {
  std::size_t merged = 0;  ///< tensors
  std::size_t kept = 0;
  std::size_t files = 0;
  std::uint64_t byte_count = 0;
};

/// @brief Writes the model with the adapter in its weights. In a unit of its own: it needs
/// LibTorch.
[[nodiscard]] MergeSummary run_merge(const MergeJob& job);

}  // namespace block_streamer_cli
