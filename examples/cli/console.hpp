// SPDX-License-Identifier: Apache-2.0
// What goes to the terminal besides text: errors, notes, progress. All of it to standard error.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace block_streamer_cli {

/// @brief "block-streamer: error: …" as one line.
void say_error(std::string_view what) noexcept;
/// @brief "block-streamer: …" as one line; erases a progress bar that stands there.
void say(std::string_view what);

/// @brief "1 row", "2 rows".
[[nodiscard]] std::string counted(std::uint64_t count, std::string_view what);
/// @brief "1.25 GiB".
[[nodiscard]] std::string readable_bytes(std::uint64_t byte_count);
/// @brief "3:07", "1:02:03".
[[nodiscard]] std::string readable_duration(double seconds);
/// @brief With `digits` after the point.
[[nodiscard]] std::string readable_number(double value, int digits);

/// @brief Progress on standard error: a bar that is redrawn where that is a terminal, else one
/// plain line every 10 s. Time left is by the pace since the first update.
/// **Threads.** One.
class Progress {
 public:
  /// @param what   begins the line: "step". @param total  0: not known.
  /// @param quiet  draw no bar, as where text goes to the same terminal.
  Progress(std::string what, std::uint64_t total, bool quiet = false);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  /// @param detail  what follows the count: "loss 2.31, 120 tokens/s, 0.6 GB/s".
  void update(std::uint64_t done, std::string_view detail);
  /// @brief Removes the bar. Plain lines stay.
  void finish() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  [[nodiscard]] std::string line(std::uint64_t done, std::string_view detail) const;

  std::string what_;
  std::uint64_t total_;
  bool terminal_;
  bool quiet_;
  bool drawn_ = false;
  Clock::time_point started_;
  Clock::time_point shown_;
};

}  // namespace block_streamer_cli
