// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1::detail {

/// Typed access to the fields of one JSON object of a configuration. null counts as absent, as it
/// does for the libraries that write these files. Every refusal names file, field and value.
class ConfigFields {
 public:
  /// Largest size or count that is believed: products of two stay within 64 bits.
  static constexpr std::uint64_t size_cap = std::uint64_t{1} << 31;

  /// @param where  how messages name the object: "config.json", "config.json, rope_scaling".
  /// **Lifetime.** `object` outlives this.
  ConfigFields(const nlohmann::json& object, std::string path, std::string prefix = {})
      : object_{object}, path_{std::move(path)}, prefix_{std::move(prefix)} {
    if (!object.is_object()) refuse("", "is no JSON object");
  }

  [[nodiscard]] const nlohmann::json* find(std::string_view key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }
  [[nodiscard]] const nlohmann::json& object() const noexcept { return object_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  /// @brief An integer in [least, size_cap].
  [[nodiscard]] std::optional<std::uint64_t> size(std::string_view key,
                                                  std::uint64_t least = 1) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return std::nullopt;
    const bool fits = value->is_number_unsigned() && value->get<std::uint64_t>() >= least &&
                      value->get<std::uint64_t>() <= size_cap;
    if (!fits) refuse(key, "must be an integer from " + std::to_string(least) + " to 2^31", value);
    return value->get<std::uint64_t>();
  }
  [[nodiscard]] std::uint64_t required_size(std::string_view key) const {
    if (const auto value = size(key)) return *value;
    refuse(key, "is missing");
  }
  /// @brief A finite number above zero.
  [[nodiscard]] std::optional<double> positive(std::string_view key) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return std::nullopt;
    const double number = value->is_number() ? value->get<double>() : 0.0;
    if (!std::isfinite(number) || number <= 0.0) refuse(key, "must be a number above 0", value);
    return number;
  }
  [[nodiscard]] double required_positive(std::string_view key) const {
    if (const auto value = positive(key)) return *value;
    refuse(key, "is missing");
  }
  [[nodiscard]] std::optional<bool> boolean(std::string_view key) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) refuse(key, "must be true or false", value);
    return value->get<bool>();
  }
  [[nodiscard]] std::optional<std::string> text(std::string_view key) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) refuse(key, "must be a string", value);
    return value->get<std::string>();
  }

  /// @throws FormatError: the field breaks the format.
  [[noreturn]] void refuse(std::string_view key, const std::string& what,
                           const nlohmann::json* value = nullptr) const {
    throw FormatError{path_, name_of_field(key) + " " + what +
                                 (value == nullptr ? "" : ", it is " + shown(*value))};
  }
  /// @throws UnsupportedError: the field is legal but asks for what is not implemented.
  [[noreturn]] void refuse_unsupported(std::string_view key, const nlohmann::json& value) const {
    throw UnsupportedError{path_ + ": " + name_of_field(key) + " = " + shown(value) +
                           " is not implemented"};
  }
  /// @brief A value for messages, cut where it is long.
  [[nodiscard]] static std::string shown(const nlohmann::json& value) {
    std::string text = value.dump();
    if (text.size() > 80) text = text.substr(0, 77) + "...";
    return text;
  }

 private:
  [[nodiscard]] std::string name_of_field(std::string_view key) const {
    const std::string name =
        prefix_ + (prefix_.empty() || key.empty() ? "" : ".") + std::string{key};
    return name.empty() ? "the file" : "'" + name + "'";
  }

  const nlohmann::json& object_;
  std::string path_;
  std::string prefix_;
};

}  // namespace block_streamer::inline v1::detail
