// SPDX-License-Identifier: Apache-2.0
#include "byte_size.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <system_error>

namespace block_streamer_cli {
namespace {

struct Unit {
  std::string_view name;  ///< in lower case
  std::uint64_t byte_count;
};
constexpr std::array<Unit, 10> units{{{"", 1},
                                      {"b", 1},
                                      {"kib", 1ULL << 10},
                                      {"mib", 1ULL << 20},
                                      {"gib", 1ULL << 30},
                                      {"tib", 1ULL << 40},
                                      {"kb", 1'000},
                                      {"mb", 1'000'000},
                                      {"gb", 1'000'000'000},
                                      {"tb", 1'000'000'000'000}}};
constexpr std::uint64_t most = (1ULL << 63) - 1;

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

std::optional<std::uint64_t> unit_of(std::string_view name) {
  if (name.starts_with(' ')) name.remove_prefix(1);
  const auto same = [&](const Unit& unit) {
    return std::equal(name.begin(), name.end(), unit.name.begin(), unit.name.end(),
                      [](char a, char b) { return lower(a) == b; });
  };
  const auto found = std::find_if(units.begin(), units.end(), same);
  return found == units.end() ? std::nullopt : std::optional{found->byte_count};
}

std::string_view digits_of(std::string_view text) {
  return text.substr(0, std::min(text.find_first_not_of("0123456789"), text.size()));
}

/// Of the digits after the point; more than a double holds change no byte.
double fraction_of(std::string_view digits) {
  double value = 0;
  double place = 1;
  for (const char digit : digits) value += (digit - '0') * (place /= 10);
  return value;
}

}  // namespace

std::string parse_byte_size(std::string_view text, std::uint64_t& byte_count) {
  const std::string quoted = "'" + std::string{text} + "' ";
  const std::string no_size =
      quoted + "is no size such as 512MiB or 1.5GiB (units: B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)";
  if (text.starts_with('-')) return quoted + "is negative; a size is 0 or more";
  const std::string_view whole = digits_of(text);
  if (whole.empty()) return no_size;
  std::string_view rest = text.substr(whole.size());
  std::string_view fraction;
  if (rest.starts_with('.')) {
    fraction = digits_of(rest.substr(1));
    if (fraction.empty()) return no_size;
    rest.remove_prefix(1 + fraction.size());
  }
  const auto unit = unit_of(rest);
  if (!unit) return no_size;
  if (!fraction.empty() && *unit == 1) return quoted + "is a fraction of a byte";
  std::uint64_t count = 0;
  const auto parsed = std::from_chars(whole.data(), whole.data() + whole.size(), count);
  const auto part = static_cast<std::uint64_t>(fraction_of(fraction) * static_cast<double>(*unit));
  if (parsed.ec != std::errc{} || count > (most - part) / *unit) {
    return quoted + "is too large; sizes end below 2^63 bytes";
  }
  byte_count = count * *unit + part;
  return {};
}

}  // namespace block_streamer_cli
