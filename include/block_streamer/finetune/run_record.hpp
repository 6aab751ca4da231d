// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/number_text.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief What a run was begun with, field by field, in words: "--lr" and "0.0002". A run that goes
/// on compares its own record with the saved one.
class RunRecord {
 public:
  /// @pre a name comes once.
  void set(std::string name, std::string value) {
    fields_.emplace_back(std::move(name), std::move(value));
  }
  void set(std::string name, double value) { set(std::move(name), number_text(value)); }
  void set(std::string name, std::uint64_t value) { set(std::move(name), number_text(value)); }

  [[nodiscard]] const std::vector<std::pair<std::string, std::string>>& fields() const noexcept {
    return fields_;
  }

 private:
  std::vector<std::pair<std::string, std::string>> fields_;
};

/// @brief Refuses to go on with a run that was begun otherwise.
/// @param place  where that run is, for the message. @param saved  its record, by name.
/// @throws Error naming the first field that differs, with both values.
inline void expect_same_run(const std::string& place, const RunRecord& record,
                            const std::map<std::string, std::string>& saved) {
  for (const auto& [name, value] : record.fields()) {
    const auto found = saved.find(name);
    if (found == saved.end()) {
      throw FormatError{place, "the saved run does not say its " + name};
    }
    if (found->second == value) continue;
    throw Error{place + " holds a run of another configuration: " + name + " was " + found->second +
                ", here it is " + value + "; give what it was begun with, or another folder"};
  }
}

}  // namespace block_streamer::inline v1
