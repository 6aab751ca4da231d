// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/tensor_spec.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1::detail {

/// A tensor as the header's JSON lists it: types and counts of the fields checked, nothing else.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  Shape shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct ParsedSafetensors {
  std::vector<SafetensorsEntry> entries;  ///< in the order of the text
  std::map<std::string, std::string> metadata;
};

/// Event handler of the header's JSON. A document tree is not built: it would keep the last of two
/// equal keys, and take many times the header's size. Throws FormatError at the first fault.
/// Depth 1 is the header, 2 a tensor or the metadata, 3 a tensor's list; more is refused, except
/// below unknown keys of a tensor, which are skipped as the reference implementation does.
class SafetensorsHandler {
 public:
  explicit SafetensorsHandler(const std::string& path) : path_{path} {}
  [[nodiscard]] ParsedSafetensors take() { return std::move(parsed_); }

  bool key(std::string& text) {
    if (depth_ == 1) return begin_entry(text);
    if (place_ == Place::skipped) return true;
    if (place_ == Place::metadata) {
      metadata_key_ = text;
      if (parsed_.metadata.count(text) != 0) fail("metadata key '" + text + "' is listed twice");
      return true;
    }
    return begin_field(text);
  }

  bool start_object(std::size_t) {
    descend();
    return depth_ <= 2 || place_ == Place::skipped || unexpected("an object");
  }
  bool end_object() {
    --depth_;
    if (depth_ == 1) end_entry();
    end_skipped();
    return true;
  }
  bool start_array(std::size_t) {
    descend();
    const bool list = depth_ == 3 && (place_ == Place::shape || place_ == Place::offsets);
    return list || place_ == Place::skipped || unexpected("an array");
  }
  bool end_array() {
    --depth_;
    if (place_ == Place::offsets && offset_count_ != 2)
      fail_entry("data_offsets has not two values");
    if (place_ == Place::shape || place_ == Place::offsets) place_ = Place::entry;
    end_skipped();
    return true;
  }

  bool string(std::string& text) {
    if (place_ == Place::metadata && depth_ == 2) {
      parsed_.metadata.emplace(std::move(metadata_key_), std::move(text));
    } else if (place_ == Place::dtype) {
      entry().dtype = std::move(text);
      place_ = Place::entry;
    } else {
      return scalar("a string");
    }
    return true;
  }
  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::shape && depth_ == 3) {
      if (entry().shape.size() == rank_cap) fail_entry("the shape has more than 64 dimensions");
      entry().shape.push_back(value);
    } else if (place_ == Place::offsets && depth_ == 3) {
      (offset_count_ == 0 ? entry().begin : entry().end) = value;
      if (++offset_count_ > 2) fail_entry("data_offsets has not two values");
    } else {
      return scalar("a number");
    }
    return true;
  }
  bool number_integer(std::int64_t value) {
    return scalar("the negative number " + std::to_string(value));
  }
  bool number_float(double, const std::string& text) {
    return scalar("'" + text.substr(0, 40) + "', which is no unsigned 64-bit integer,");
  }
  bool boolean(bool) { return scalar("true or false"); }
  bool binary(std::vector<std::uint8_t>&) { return scalar("binary data"); }
  bool null() {
    if (place_ == Place::metadata && depth_ == 1) {
      place_ = Place::header;
      return true;
    }
    return scalar("null");
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& why) {
    std::string reason = why.what();
    if (const auto text = reason.find("syntax error"); text != std::string::npos) {
      reason.erase(0, text);
    }
    throw FormatError{path_, "the header is not valid JSON: " + reason.substr(0, 160),
                      8 + (position == 0 ? 0 : position - 1)};
  }

 private:
  enum class Place { header, metadata, entry, dtype, shape, offsets, skipped };
  static constexpr std::size_t depth_cap = 32;
  static constexpr std::size_t rank_cap = 64;

  SafetensorsEntry& entry() { return parsed_.entries.back(); }

  [[noreturn]] void fail(const std::string& what) const { throw FormatError{path_, what}; }
  [[noreturn]] void fail_entry(const std::string& what) {
    fail("tensor '" + entry().name + "': " + what);
  }
  bool unexpected(const std::string& what) {
    if (depth_ <= 1 && place_ == Place::header) fail("the header is " + what + ", not an object");
    if (place_ == Place::metadata) fail("__metadata__ maps strings to strings, it has " + what);
    static constexpr const char* places[] = {
        "", "", "", " in dtype", " in shape", " in data_offsets", ""};
    fail_entry(what + places[static_cast<std::size_t>(place_)] + " is not expected there");
  }
  /// A scalar where none fits; skipped below unknown keys.
  bool scalar(const std::string& what) {
    if (place_ != Place::skipped) return unexpected(what);
    end_skipped();
    return true;
  }
  void descend() {
    if (++depth_ > depth_cap) fail("the header is nested deeper than " + std::to_string(depth_cap));
  }

  bool begin_entry(std::string& name) {
    if (name == "__metadata__") {
      if (seen_metadata_) fail("__metadata__ is listed twice in the header");
      seen_metadata_ = true;
      place_ = Place::metadata;
    } else {
      parsed_.entries.push_back({std::move(name), {}, {}, 0, 0});
      fields_ = 0;
      place_ = Place::entry;
    }
    return true;
  }
  void end_entry() {
    if (place_ == Place::entry && fields_ != 7) {
      fail_entry("dtype, shape and data_offsets are needed");
    }
    if (place_ == Place::entry && entry().begin > entry().end) {
      fail_entry("data_offsets [" + std::to_string(entry().begin) + ", " +
                 std::to_string(entry().end) + "] run backwards");
    }
    place_ = Place::header;
  }
  bool begin_field(const std::string& key) {
    const unsigned field = key == "dtype" ? 1 : key == "shape" ? 2 : key == "data_offsets" ? 4 : 0;
    if ((fields_ & field) != 0) fail_entry("key '" + key + "' is listed twice");
    fields_ |= field;
    place_ = field == 1   ? Place::dtype
             : field == 2 ? Place::shape
             : field == 4 ? Place::offsets
                          : Place::skipped;
    offset_count_ = 0;
    return true;
  }
  /// Back to the tensor once the value of an unknown key has ended.
  void end_skipped() {
    if (place_ == Place::skipped && depth_ == 2) place_ = Place::entry;
  }

  const std::string& path_;
  ParsedSafetensors parsed_;
  std::string metadata_key_;
  std::size_t depth_ = 0;
  Place place_ = Place::header;
  unsigned fields_ = 0;  ///< bits of the tensor's keys seen so far
  unsigned offset_count_ = 0;
  bool seen_metadata_ = false;
};

/// @brief Parses the header's JSON text. @throws FormatError
[[nodiscard]] inline ParsedSafetensors parse_safetensors_json(const std::string& path,
                                                              std::string_view text) {
  refuse_nul(text, path, 8);
  SafetensorsHandler handler{path};
  nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
  return handler.take();
}

}  // namespace block_streamer::inline v1::detail
