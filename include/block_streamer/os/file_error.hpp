// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <string>
#include <system_error>
#include <type_traits>

namespace block_streamer::inline v1 {

/// Failures of a file that no error number of the system names.
enum class FileErrc {
  shrank = 1,  ///< the file ends before the bytes that were asked for
};

namespace detail {
class FileErrorCategory final : public std::error_category {
 public:
  [[nodiscard]] const char* name() const noexcept override { return "file"; }
  [[nodiscard]] std::string message(int) const override {
    return "the file ends before these bytes: it shrank or was replaced since it was opened";
  }
};
/// Immutable and without state: an error_category is compared by address only.
inline const FileErrorCategory file_error_category{};
}  // namespace detail

/// @brief Lets `std::error_code{FileErrc::shrank}` and comparisons with FileErrc work.
[[nodiscard]] inline std::error_code make_error_code(FileErrc code) noexcept {
  return {static_cast<int>(code), detail::file_error_category};
}

}  // namespace block_streamer::inline v1

template <>
struct std::is_error_code_enum<block_streamer::FileErrc> : std::true_type {};
