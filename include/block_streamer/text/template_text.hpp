// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {

/// Brings a chat template into a form in which templates that render alike compare equal: without
/// white space that does not render, with one kind of quotes and of subscripts. Understands the
/// lexical layer of Jinja only (with trim_blocks and lstrip_blocks on, as chat templates are used).
class TemplateCanonicalizer {
 public:
  explicit TemplateCanonicalizer(std::string_view text) : in_{text} {
    if (in_.ends_with('\n')) in_.remove_suffix(1);
  }

  [[nodiscard]] std::string run() {
    while (at_ < in_.size()) {
      const std::size_t open = next_tag();
      literal(in_.substr(at_, open - at_), open);
      if (open >= in_.size()) break;
      tag(open);
    }
    return std::move(out_);
  }

 private:
  [[nodiscard]] std::size_t next_tag() const {
    for (std::size_t i = in_.find('{', at_); i < in_.size(); i = in_.find('{', i + 1)) {
      const char kind = i + 1 < in_.size() ? in_[i + 1] : '\0';
      if (kind == '{' || kind == '%' || kind == '#') return i;
    }
    return in_.size();
  }

  static bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

  /// Text between tags, less what the tags around it take away.
  void literal(std::string_view text, std::size_t open) {
    if (trim_after_) {
      while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
    } else if (after_block_ && text.starts_with('\n')) {
      text.remove_prefix(1);
      at_line_start_ = true;
    }
    const char kind = open + 1 < in_.size() ? in_[open + 1] : '\0';
    if (open + 2 < in_.size() && in_[open + 2] == '-') {
      while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
    } else if (kind == '%' || kind == '#') {
      std::size_t keep = text.size();
      while (keep > 0 && (text[keep - 1] == ' ' || text[keep - 1] == '\t')) --keep;
      if (keep == 0 ? at_line_start_ : text[keep - 1] == '\n') text = text.substr(0, keep);
    }
    out_ += text;
  }

  void tag(std::size_t open) {
    const char kind = in_[open + 1];
    const std::string close{kind == '{' ? '}' : kind, '}'};
    std::string body;
    std::size_t at = open + 2;
    if (at < in_.size() && (in_[at] == '-' || in_[at] == '+')) ++at;
    trim_after_ = false;
    while (at < in_.size() && in_.substr(at, 2) != close) {
      if (in_[at] == '-' && in_.substr(at + 1, 2) == close) {
        trim_after_ = true;
        ++at;
      } else if (kind != '#' && (in_[at] == '\'' || in_[at] == '"')) {
        at = quoted(at, body);
      } else {
        if (!is_space(in_[at])) body += in_[at];
        ++at;
      }
    }
    const bool closed = in_.substr(std::min(at, in_.size()), 2) == close;
    at_ = std::min(in_.size(), at + 2);
    after_block_ = kind != '{';
    at_line_start_ = false;
    if (kind != '#' || !closed) out_.append({'{', kind}).append(body).append(closed ? close : "");
  }

  /// A string, or the attribute that ['name'] stands for.
  std::size_t quoted(std::size_t at, std::string& body) const {
    const char quote = in_[at++];
    std::string text;
    for (; at < in_.size() && in_[at] != quote; ++at) {
      if (in_[at] == '\\' && at + 1 < in_.size()) {
        text += in_[++at] == 'n' ? '\n' : in_[at];
      } else {
        text += in_[at];
      }
    }
    ++at;
    const bool name = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
      return c == '_' || (c >= 'a' && c <= 'z');
    });
    if (name && body.ends_with('[') && in_.substr(std::min(at, in_.size()), 1) == "]") {
      body.back() = '.';
      body += text;
      return at + 1;
    }
    body.append("'").append(text).append("'");
    return at;
  }

  std::string_view in_;
  std::string out_;
  std::size_t at_ = 0;
  bool trim_after_ = false;  ///< the tag before ended with -
  bool at_line_start_ = true;
  bool after_block_ = false;  ///< the tag before was a statement or a comment
};

}  // namespace detail

/// @brief The form of a template that is compared with known ones.
[[nodiscard]] inline std::string canonical_template(std::string_view text) {
  return detail::TemplateCanonicalizer{text}.run();
}

/// @brief Whether `text` consists of `pieces` in this order with anything between them. It must
/// begin with the first and end with the last.
[[nodiscard]] inline bool consists_of(std::string_view text,
                                      const std::vector<std::string>& pieces) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const bool last = i + 1 == pieces.size();
    if (last && text.size() < at + pieces[i].size()) return false;
    const std::size_t found = last     ? text.size() - pieces[i].size()
                              : i == 0 ? 0
                                       : text.find(pieces[i], at);
    if (found == std::string_view::npos) return false;
    if (text.compare(found, pieces[i].size(), pieces[i]) != 0) return false;
    at = found + pieces[i].size();
  }
  return at == text.size();
}

}  // namespace block_streamer::inline v1
