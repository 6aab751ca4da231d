// SPDX-License-Identifier: Apache-2.0
#include "console.hpp"

#include <array>
#include <cstdio>
#include <utility>

#include <unistd.h>

namespace block_streamer_cli {
namespace {

constexpr std::chrono::milliseconds redraw_every{100};
constexpr std::chrono::seconds plain_line_every{10};
constexpr std::size_t bar_width = 24;

/// Nothing that breaks the line or moves the cursor.
std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    line += control ? ' ' : c;
  }
  while (line.ends_with(' ')) line.pop_back();
  return line;
}

void write_line(std::string_view begin, std::string_view what) noexcept {
  try {
    const std::string line = (::isatty(STDERR_FILENO) != 0 ? "\r\x1b[K" : "") + std::string{begin} +
                             one_line(what) + "\n";
    static_cast<void>(std::fwrite(line.data(), 1, line.size(), stderr));
  } catch (...) {  // no memory for the message
    static_cast<void>(std::fputs("block-streamer: error: out of memory\n", stderr));
  }
}

}  // namespace

void say_error(std::string_view what) noexcept {
  write_line("block-streamer: error: ", what);
}
void say(std::string_view what) {
  write_line("block-streamer: ", what);
}

std::string readable_number(double value, int digits) {
  std::array<char, 64> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return {text.data(), static_cast<std::size_t>(size)};
}

std::string counted(std::uint64_t count, std::string_view what) {
  return std::to_string(count) + " " + std::string{what} + (count == 1 ? "" : "s");
}

std::string readable_bytes(std::uint64_t byte_count) {
  if (byte_count < 1024) return std::to_string(byte_count) + " bytes";
  double value = static_cast<double>(byte_count) / 1024;
  std::size_t unit = 0;
  constexpr std::array<std::string_view, 5> units{"KiB", "MiB", "GiB", "TiB", "PiB"};
  while (value >= 1024 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  return readable_number(value, value < 100 ? 1 : 0) + " " + std::string{units[unit]};
}

std::string readable_duration(double seconds) {
  const auto whole = static_cast<std::uint64_t>(seconds < 0 ? 0 : seconds + 0.5);
  const auto two = [](std::uint64_t n) { return (n < 10 ? "0" : "") + std::to_string(n); };
  const std::string end = two(whole % 60);
  if (whole < 3600) return std::to_string(whole / 60) + ":" + end;
  return std::to_string(whole / 3600) + ":" + two(whole / 60 % 60) + ":" + end;
}

Progress::Progress(std::string what, std::uint64_t total, bool quiet)
    : what_{std::move(what)},
      total_{total},
      terminal_{::isatty(STDERR_FILENO) != 0},
      quiet_{quiet && terminal_},
      started_{Clock::now()},
      shown_{started_} {}

Progress::~Progress() {
  finish();
}

std::string Progress::line(std::uint64_t done, std::string_view detail) const {
  std::string text = what_ + " " + std::to_string(done);
  if (total_ != 0) text += "/" + std::to_string(total_);
  if (!detail.empty()) text += ", " + std::string{detail};
  const double spent = std::chrono::duration<double>(Clock::now() - started_).count();
  if (total_ != 0 && done != 0 && done < total_) {
    const double left = spent / static_cast<double>(done) * static_cast<double>(total_ - done);
    text += ", ETA " + readable_duration(left);
  }
  return text;
}

void Progress::update(std::uint64_t done, std::string_view detail) {
  if (quiet_) return;
  const auto now = Clock::now();
  if (now - shown_ < (terminal_ ? Clock::duration{redraw_every} : plain_line_every)) return;
  shown_ = now;
  if (!terminal_) return write_line("block-streamer: ", line(done, detail));
  std::string bar;
  if (total_ != 0) {
    const std::size_t full =
        static_cast<std::size_t>(bar_width * (done < total_ ? done : total_) / total_);
    bar = "[" + std::string(full, '=') + std::string(bar_width - full, ' ') + "] ";
  }
  const std::string text = "\r\x1b[K" + bar + line(done, detail);
  static_cast<void>(std::fwrite(text.data(), 1, text.size(), stderr));
  static_cast<void>(std::fflush(stderr));
  drawn_ = true;
}

void Progress::finish() noexcept {
  if (!std::exchange(drawn_, false)) return;
  static_cast<void>(std::fputs("\r\x1b[K", stderr));
  static_cast<void>(std::fflush(stderr));
}

}  // namespace block_streamer_cli
