// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <string>
#include <system_error>
#include <type_traits>

namespace block_streamer::inline v1 {

/// Why a verified read failed although reading succeeded.
enum class ChecksumErrc {
  mismatch = 1,  ///< the bytes are not those that were summed
};

namespace detail {
class ChecksumErrorCategory final : public std::error_category {
 public:
  [[nodiscard]] const char* name() const noexcept override { return "checksum"; }
  [[nodiscard]] std::string message(int) const override {
    return "the stored bytes are not those that were summed";
  }
};
/// Immutable and without state: an error_category is compared by address only.
inline const ChecksumErrorCategory checksum_error_category{};
}  // namespace detail

/// @brief Lets `std::error_code{ChecksumErrc::mismatch}` and comparisons with ChecksumErrc work.
[[nodiscard]] inline std::error_code make_error_code(ChecksumErrc code) noexcept {
  return {static_cast<int>(code), detail::checksum_error_category};
}

}  // namespace block_streamer::inline v1

template <>
struct std::is_error_code_enum<block_streamer::ChecksumErrc> : std::true_type {};
