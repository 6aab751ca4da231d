// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Lets string maps be searched with a view.
struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const noexcept {
    return std::hash<std::string_view>{}(text);
  }
};

template <typename T>
using StringMap = std::unordered_map<std::string, T, StringHash, std::equal_to<>>;

/// The two-way table of tokens and ids. Ids need not be dense.
class Vocabulary {
 public:
  /// Ids below this bound are accepted: 16 times the largest vocabulary in use.
  static constexpr std::int64_t max_ids = std::int64_t{1} << 22U;

  /// @brief Adds a token unless its text or its id is taken.
  /// @pre 0 <= id < max_ids
  [[nodiscard]] bool add(std::string_view text, std::int32_t id) {
    const auto index = static_cast<std::size_t>(id);
    if (index < present_.size() && present_[index]) return false;
    if (!ids_.emplace(std::string{text}, id).second) return false;
    if (index >= present_.size()) {
      present_.resize(index + 1);
      texts_.resize(index + 1);
    }
    present_[index] = true;
    texts_[index] = text;
    return true;
  }

  [[nodiscard]] std::optional<std::int32_t> find(std::string_view text) const {
    const auto at = ids_.find(text);
    return at == ids_.end() ? std::nullopt : std::optional{at->second};
  }
  /// @brief The token, or null if no token has this id.
  [[nodiscard]] const std::string* text_of(std::int64_t id) const noexcept {
    const auto index = static_cast<std::size_t>(id);
    return id >= 0 && index < present_.size() && present_[index] ? &texts_[index] : nullptr;
  }
  /// @brief Number of tokens.
  [[nodiscard]] std::size_t token_count() const noexcept { return ids_.size(); }
  /// @brief One more than the largest id.
  [[nodiscard]] std::size_t id_end() const noexcept { return present_.size(); }

 private:
  StringMap<std::int32_t> ids_;
  std::vector<std::string> texts_;
  std::vector<bool> present_;
};

}  // namespace block_streamer::inline v1
