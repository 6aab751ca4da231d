// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Deepest nesting of arrays and objects that a JSON file may have.
inline constexpr std::size_t max_json_depth = 64;

namespace detail {

/// Builds the document while it is parsed and refuses what the library's own builder lets through:
/// duplicate keys and unbounded depth.
class JsonBuilder {
 public:
  using json = nlohmann::json;

  JsonBuilder(json& root, const std::string& path) : root_{root}, path_{path} {}

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(json::number_integer_t value) { return put(value); }
  bool number_unsigned(json::number_unsigned_t value) { return put(value); }
  bool number_float(json::number_float_t value, const std::string&) { return put(value); }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(json::binary_t&) { throw FormatError{path_, "binary value in JSON"}; }
  bool start_object(std::size_t) { return open(json::object()); }
  bool end_object() { return close(); }
  bool start_array(std::size_t) { return open(json::array()); }
  bool end_array() { return close(); }

  bool key(std::string& name) {
    json& object = *open_.back();
    if (object.contains(name)) throw FormatError{path_, "key '" + name + "' is listed twice"};
    slot_ = &object[name];
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception& error) {
    const std::string_view text = error.what();  // "[json.exception...] message"
    const std::size_t end = text.find("] ");
    auto what = end == std::string_view::npos ? text : text.substr(end + 2);
    // The only line of a row in a file of many says what the byte says, and of the wrong line.
    if (what.starts_with("parse error at line 1, ")) what.remove_prefix(what.find(": ") + 2);
    throw FormatError{path_, "not valid JSON: " + std::string{what}, position};
  }

 private:
  json& place(json value) {
    if (open_.empty()) return root_ = std::move(value);
    if (open_.back()->is_object()) return *slot_ = std::move(value);
    open_.back()->push_back(std::move(value));
    return open_.back()->back();
  }
  bool put(json value) {
    place(std::move(value));
    return true;
  }
  bool open(json value) {
    if (open_.size() >= max_json_depth) {
      throw FormatError{path_, "nested deeper than " + std::to_string(max_json_depth) + " levels"};
    }
    open_.push_back(&place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  json& root_;
  const std::string& path_;
  std::vector<json*> open_;
  json* slot_ = nullptr;
};

/// The parser takes a NUL for the end of its input: what follows would go unchecked.
inline void refuse_nul(std::string_view text, const std::string& path, std::uint64_t text_begin) {
  if (const auto at = text.find('\0'); at != std::string_view::npos) {
    throw FormatError{path, "not valid JSON: a zero byte", text_begin + at};
  }
}

}  // namespace detail

/// @brief Parses one JSON document that fills `text` and that nobody vouches for.
/// @param path  for messages.
/// @throws FormatError naming `path` and, for a syntax error, the byte, if the text is not JSON in
/// UTF-8, is nested deeper than max_json_depth, repeats a key within an object, or is a Git LFS
/// pointer.
[[nodiscard]] inline nlohmann::json parse_json(std::string_view text, const std::string& path) {
  if (text.starts_with("version https://git-lfs")) {
    throw FormatError{path, "this is a Git LFS pointer; fetch the file with 'git lfs pull'"};
  }
  detail::refuse_nul(text, path, 0);
  nlohmann::json document;
  detail::JsonBuilder builder{document, path};
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return document;
}

/// A JSON object with its place, for reading fields that must have a type.
class JsonObject {
 public:
  /// @throws FormatError if `value` is not an object.
  JsonObject(const nlohmann::json& value, std::string path, std::string name)
      : value_{&value}, path_{std::move(path)}, name_{std::move(name)} {
    if (!value.is_object()) fail("must be an object");
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const nlohmann::json& value() const noexcept { return *value_; }

  /// @brief The field, or null if it is absent or JSON null.
  [[nodiscard]] const nlohmann::json* find(const char* key) const {
    const auto at = value_->find(key);
    return at == value_->end() || at->is_null() ? nullptr : &*at;
  }
  [[nodiscard]] const nlohmann::json& required(const char* key) const {
    if (const auto* field = find(key)) return *field;
    fail(std::string{"lacks \""} + key + "\"");
  }
  [[nodiscard]] const std::string& string(const char* key) const {
    const auto& field = required(key);
    if (!field.is_string()) fail_field(key, "a string");
    return field.get_ref<const std::string&>();
  }
  [[nodiscard]] bool boolean(const char* key) const {
    const auto& field = required(key);
    if (!field.is_boolean()) fail_field(key, "true or false");
    return field.get<bool>();
  }
  [[nodiscard]] bool boolean_or(const char* key, bool absent) const {
    return find(key) == nullptr ? absent : boolean(key);
  }
  [[nodiscard]] const nlohmann::json& array(const char* key) const {
    const auto& field = required(key);
    if (!field.is_array()) fail_field(key, "an array");
    return field;
  }
  /// @brief An object field, named in messages as `name().key`.
  [[nodiscard]] JsonObject object(const char* key) const {
    return JsonObject{required(key), path_, name_ + "." + key};
  }
  /// @throws UnsupportedError naming the option and the file if there is a key beside `known`.
  void allow_only(std::initializer_list<std::string_view> known) const {
    for (const auto& item : value_->items()) {
      if (std::find(known.begin(), known.end(), item.key()) != known.end()) continue;
      throw UnsupportedError{path_ + ": " + name_ + " has the option \"" + item.key() +
                             "\", which is not supported"};
    }
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw FormatError{path_, name_ + " " + what};
  }
  [[noreturn]] void refuse(const std::string& what) const {
    throw UnsupportedError{path_ + ": " + name_ + ": " + what};
  }

 private:
  [[noreturn]] void fail_field(const char* key, const std::string& kind) const {
    throw FormatError{path_, name_ + ": \"" + key + "\" must be " + kind};
  }

  const nlohmann::json* value_;
  std::string path_;
  std::string name_;
};

}  // namespace block_streamer::inline v1
