// SPDX-License-Identifier: Apache-2.0
// The limit: the same files, read by plain threads with nothing else to do.
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/os/direct_io.hpp>
#include <block_streamer/os/huge_pages.hpp>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace block_streamer_benchmarks {

/// @brief Bytes a second at which `threads` threads read whole files, `piece` bytes at a time.
/// @param direct  past the page cache. @throws std::runtime_error if that is refused, or a read
/// fails.
[[nodiscard]] inline double read_rate(std::span<const std::filesystem::path> paths, bool direct,
                                      std::size_t threads, std::size_t piece) {
  namespace bs = block_streamer;
  struct Piece {
    int file;
    std::uint64_t offset;
  };
  std::vector<bs::File> files;
  std::vector<Piece> pieces;
  std::uint64_t total = 0;
  for (const std::filesystem::path& path : paths) {
    files.push_back(bs::File::open(path));
    if (direct) {
      const bs::DirectIo probe = bs::enable_direct_io(files.back());
      if (!probe.works()) throw std::runtime_error{"no O_DIRECT probe: " + probe.refusal};
    }
    const std::uint64_t size = std::filesystem::file_size(path);
    total += size;
    for (std::uint64_t at = 0; at < size; at += piece) {
      pieces.push_back({files.back().native_handle(), at});
    }
  }
  bs::HugePages memory{piece * threads};
  std::ranges::fill(memory.bytes(), std::byte{1});
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  const auto begin = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> workers;
    for (std::size_t t = 0; t < threads; ++t) {
      workers.emplace_back([&, out = memory.bytes().subspan(t * piece, piece)] {
        for (std::size_t i = next++; i < pieces.size(); i = next++) {
          const auto at = static_cast<off_t>(pieces[i].offset);
          if (::pread(pieces[i].file, out.data(), out.size(), at) <= 0) failed = true;
        }
      });
    }
  }
  const double time =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (failed) throw std::runtime_error{"a read of the probe failed"};
  return static_cast<double>(total) / time;
}

}  // namespace block_streamer_benchmarks
