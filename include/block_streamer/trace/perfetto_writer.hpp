// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

inline constexpr std::array<std::string_view, 6> lane_names{"caller",  "storage",  "copy in",
                                                            "compute", "copy out", "optimizer"};

/// Microseconds with three digits, exact: the viewers' unit, without going through floating point.
inline std::string microseconds(Nanoseconds time) {
  const std::int64_t count = time.count();
  const std::uint64_t size =
      count < 0 ? 0 - static_cast<std::uint64_t>(count) : static_cast<std::uint64_t>(count);
  std::string fraction = std::to_string(size % 1000);
  fraction.insert(0, 3 - fraction.size(), '0');
  return (count < 0 ? "-" : "") + std::to_string(size / 1000) + "." + fraction;
}

inline std::string json_string(std::string_view text) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20) {
      quoted += "\\u00";
      quoted += digits[byte >> 4];
      quoted += digits[byte & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

/// Intervals of one row must nest, or the viewers drop them. Reads in flight together overlap
/// without nesting, so a lane gets a further row whenever none of its rows can take the interval.
class LaneRows {
 public:
  /// @brief The row for the next interval. @pre intervals come sorted by begin, longest first.
  std::size_t place(const TraceEvent& event) {
    for (std::size_t row = 0; row < open_.size(); ++row) {
      std::vector<Nanoseconds>& ends = open_[row];
      while (!ends.empty() && ends.back() <= event.begin) ends.pop_back();
      if (ends.empty() || event.end <= ends.back()) {
        ends.push_back(event.end);
        return row;
      }
    }
    open_.push_back({event.end});
    return open_.size() - 1;
  }

 private:
  std::vector<std::vector<Nanoseconds>> open_;
};

}  // namespace detail

/// @brief Collects events and writes them as a Chrome trace, for ui.perfetto.dev: a process per
/// device, a named row per lane (and further rows where intervals of a lane overlap).
/// **Threads.** Any, at once. **Cost.** Memory for `capacity` events, allocated when made; a lock
/// per event. A full buffer drops what comes later and counts it.
class PerfettoWriter {
 public:
  explicit PerfettoWriter(std::size_t capacity = std::size_t{1} << 16) : capacity_{capacity} {
    events_.reserve(capacity);
  }

  [[nodiscard]] bool enabled() const noexcept { return enabled_.load(std::memory_order_relaxed); }
  /// @brief Starts or stops the taking of time stamps; events under way may still arrive.
  void enable(bool on) noexcept { enabled_.store(on, std::memory_order_relaxed); }

  void record(const TraceEvent& event) noexcept {
    const std::scoped_lock lock{mutex_};
    if (events_.size() == capacity_) {
      ++dropped_;
    } else {
      events_.push_back(event);
    }
  }
  [[nodiscard]] std::size_t size() const noexcept {
    const std::scoped_lock lock{mutex_};
    return events_.size();
  }
  /// @brief A copy of what was recorded so far, in the order of its arrival.
  [[nodiscard]] std::vector<TraceEvent> events() const {
    const std::scoped_lock lock{mutex_};
    return events_;
  }
  [[nodiscard]] std::uint64_t dropped() const noexcept {
    const std::scoped_lock lock{mutex_};
    return dropped_;
  }
  void clear() noexcept {
    const std::scoped_lock lock{mutex_};
    events_.clear();
    dropped_ = 0;
  }

  /// @brief The trace as JSON. The text depends on the set of events, not on their arrival.
  void write_to(std::ostream& out) const {
    auto [events, dropped] = sorted_events();
    out << "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"dropped\":\"" + std::to_string(dropped) +
               "\"},\"traceEvents\":[";
    std::map<std::pair<std::uint16_t, Lane>, detail::LaneRows> lanes;
    std::map<Row, bool> named;
    std::string separator = "\n";
    for (const TraceEvent& event : events) {
      const Row row{event.device, event.lane, lanes[{event.device, event.lane}].place(event)};
      if (!std::exchange(named[row], true)) out << std::exchange(separator, ",\n") + row.names();
      out << ",\n" + to_json(event, row);
    }
    out << "\n]}\n";
  }
  /// @throws StorageError if the file cannot be written.
  void write_to(const std::filesystem::path& path) const {
    errno = 0;
    std::ofstream out{path, std::ios::binary | std::ios::trunc};
    write_to(out);
    out.close();
    if (!out) {
      throw StorageError{
          path.string(), "the trace could not be written", {errno, std::generic_category()}};
    }
  }

 private:
  struct Row {
    std::uint16_t device;
    Lane lane;
    std::size_t index;
    auto operator<=>(const Row&) const = default;

    [[nodiscard]] std::string place() const {
      const std::size_t tid = static_cast<std::size_t>(lane) * 1000 + index;
      return "\"pid\":" + std::to_string(device) + ",\"tid\":" + std::to_string(tid);
    }
    /// The metadata events that name the process and the row, and order the rows.
    [[nodiscard]] std::string names() const {
      std::string name{detail::lane_names[static_cast<std::size_t>(lane)]};
      if (index != 0) name += " " + std::to_string(index + 1);
      const std::size_t order = static_cast<std::size_t>(lane) * 1000 + index;
      return "{\"ph\":\"M\",\"name\":\"process_name\"," + place() +
             ",\"args\":{\"name\":\"device " + std::to_string(device) + "\"}},\n" +
             "{\"ph\":\"M\",\"name\":\"thread_name\"," + place() + ",\"args\":{\"name\":\"" + name +
             "\"}},\n{\"ph\":\"M\",\"name\":\"thread_sort_index\"," + place() +
             ",\"args\":{\"sort_index\":" + std::to_string(order) + "}}";
    }
  };

  [[nodiscard]] std::pair<std::vector<TraceEvent>, std::uint64_t> sorted_events() const {
    std::pair<std::vector<TraceEvent>, std::uint64_t> copy;
    {
      const std::scoped_lock lock{mutex_};
      copy = {events_, dropped_};
    }
    std::ranges::sort(copy.first, {}, [](const TraceEvent& e) {
      return std::tuple{e.device, e.lane, e.begin, -e.end, e.part, e.name, e.byte_count};
    });
    return copy;
  }

  static std::string to_json(const TraceEvent& event, const Row& row) {
    std::string text = "{\"name\":" + detail::json_string(event.name) + "," + row.place() +
                       ",\"ts\":" + detail::microseconds(event.begin);
    if (event.end > event.begin) {
      text += ",\"ph\":\"X\",\"dur\":" + detail::microseconds(event.end - event.begin);
    } else {
      text += ",\"ph\":\"i\",\"s\":\"t\"";
    }
    return text + ",\"args\":{\"block\":" + std::to_string(index_of(event.part.block)) +
           ",\"part\":" + std::to_string(event.part.part) +
           ",\"bytes\":" + std::to_string(event.byte_count) + "}}";
  }

  const std::size_t capacity_;
  std::atomic<bool> enabled_{true};
  mutable std::mutex mutex_;  // guards the members below
  std::vector<TraceEvent> events_;
  std::uint64_t dropped_ = 0;
};
static_assert(trace_sink<PerfettoWriter>);

}  // namespace block_streamer::inline v1
