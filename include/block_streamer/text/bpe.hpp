// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>
#include <block_streamer/text/utf8.hpp>
#include <block_streamer/text/vocabulary.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Which pair of tokens merges into which token, and how early.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = 0;
    std::int32_t result = -1;
  };

  explicit MergeTable(std::size_t expected = 0)
      : cells_(std::bit_ceil(std::max<std::size_t>(16, expected * 2))) {}

  /// @brief Sets a pair's merge; the last one given counts.
  void set(std::int32_t left, std::int32_t right, Merge merge) {
    if ((count_ + 1) * 2 > cells_.size()) grow();
    Cell& cell = cells_[place(key_of(left, right))];
    if (cell.merge.result < 0) ++count_;
    cell = {key_of(left, right), merge};
  }
  [[nodiscard]] const Merge* find(std::int32_t left, std::int32_t right) const noexcept {
    const Cell& cell = cells_[place(key_of(left, right))];
    return cell.merge.result < 0 ? nullptr : &cell.merge;
  }

 private:
  struct Cell {
    std::uint64_t key = 0;
    Merge merge;
  };
  static std::uint64_t key_of(std::int32_t left, std::int32_t right) noexcept {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32U |
           static_cast<std::uint32_t>(right);
  }
  [[nodiscard]] std::size_t place(std::uint64_t key) const noexcept {
    std::uint64_t hash = key * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 32U;
    std::size_t at = hash & (cells_.size() - 1);
    while (cells_[at].merge.result >= 0 && cells_[at].key != key)
      at = (at + 1) & (cells_.size() - 1);
    return at;
  }
  void grow() {
    std::vector<Cell> old(cells_.size() * 2);
    old.swap(cells_);
    for (const Cell& cell : old) {
      if (cell.merge.result >= 0) cells_[place(cell.key)] = cell;
    }
  }

  std::vector<Cell> cells_;
  std::size_t count_ = 0;
};

struct BpeOptions {
  bool ignore_merges = false;  ///< a word that is a token is that token, whatever the merges
  bool byte_fallback = false;  ///< an unknown character becomes its bytes' <0xNN> tokens
  bool fuse_unknown = false;   ///< adjacent unknown characters become one unknown token
  std::optional<std::int32_t> unknown;  ///< without it unknown characters vanish
};

/// The byte-pair model: a word's characters, merged by ascending rank.
///
/// **Threads.** Const use from several threads, each with its own Scratch.
class Bpe {
 public:
  /// Working memory of one thread, reused between words.
  class Scratch {
    friend class Bpe;
    struct Symbol {
      std::int32_t id;
      std::int32_t previous, next;  ///< indices, -1 at the ends
      bool gone;
    };
    struct Candidate {
      std::uint32_t rank;
      std::int32_t at;
      std::int32_t result;
      /// Heap order: the lowest rank, then the leftmost, on top.
      friend bool operator<(const Candidate& a, const Candidate& b) noexcept {
        return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
      }
    };
    std::vector<Symbol> symbols_;
    std::vector<Candidate> heap_;
  };

  Bpe() = default;
  /// @param merges ids of `vocabulary`
  Bpe(Vocabulary vocabulary, MergeTable merges, BpeOptions options)
      : vocabulary_{std::move(vocabulary)}, merges_{std::move(merges)}, options_{options} {
    low_.fill(-1);
    bytes_.fill(-1);
    for (std::uint32_t point = 0; point < low_.size(); ++point) {
      std::string text;
      append_utf8(text, point);
      low_[point] = vocabulary_.find(text).value_or(-1);
    }
    constexpr std::string_view digits = "0123456789ABCDEF";
    for (std::size_t b = 0; options_.byte_fallback && b < bytes_.size(); ++b) {
      const std::string text{'<', '0', 'x', digits[b >> 4U], digits[b & 15U], '>'};
      bytes_[b] = vocabulary_.find(text).value_or(-1);
    }
  }

  [[nodiscard]] const Vocabulary& vocabulary() const noexcept { return vocabulary_; }

  /// @brief Appends the word's ids to `out`.
  /// @pre `word` is UTF-8, shorter than 2 GiB.
  /// **Cost.** O(n log n) in the word's length.
  void encode_word(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const {
    expects(word.size() < std::size_t{1} << 31U, "a word must be shorter than 2 GiB");
    if (options_.ignore_merges) {
      if (const auto id = vocabulary_.find(word)) return out.push_back(*id);
    }
    scratch.symbols_.clear();
    spell(word, scratch);
    merge(scratch);
    for (const auto& symbol : scratch.symbols_) {
      if (!symbol.gone) out.push_back(symbol.id);
    }
  }

 private:
  using Symbol = Scratch::Symbol;

  static void add(Scratch& scratch, std::int32_t id) {
    const auto index = static_cast<std::int32_t>(scratch.symbols_.size());
    if (index > 0) scratch.symbols_.back().next = index;
    scratch.symbols_.push_back({id, index - 1, -1, false});
  }

  /// One symbol a character. An unknown token waits until the next known character, also past byte
  /// tokens, because a following unknown one may fuse with it; files are made for this order.
  void spell(std::string_view word, Scratch& scratch) const {
    bool waiting = false;
    for (std::size_t at = 0; at < word.size();) {
      const Utf8Step step = utf8_step(word, at);
      const std::string_view character = word.substr(at, step.length);
      at += step.length;
      const std::int32_t id = step.code_point < low_.size()
                                  ? low_[step.code_point]
                                  : vocabulary_.find(character).value_or(-1);
      if (id >= 0) {
        if (std::exchange(waiting, false)) add(scratch, *options_.unknown);
        add(scratch, id);
      } else if (!(options_.byte_fallback && spell_bytes(character, scratch)) && options_.unknown) {
        if (waiting && !options_.fuse_unknown) add(scratch, *options_.unknown);
        waiting = true;
      }
    }
    if (waiting) add(scratch, *options_.unknown);
  }

  [[nodiscard]] bool spell_bytes(std::string_view character, Scratch& scratch) const {
    const auto token_of = [this](char c) { return bytes_[static_cast<unsigned char>(c)]; };
    if (std::any_of(character.begin(), character.end(), [&](char c) { return token_of(c) < 0; })) {
      return false;
    }
    for (const char c : character) add(scratch, token_of(c));
    return true;
  }

  void propose(Scratch& scratch, std::int32_t at) const {
    const Symbol& left = scratch.symbols_[static_cast<std::size_t>(at)];
    if (left.next < 0) return;
    const Symbol& right = scratch.symbols_[static_cast<std::size_t>(left.next)];
    if (const auto* merge = merges_.find(left.id, right.id)) {
      scratch.heap_.push_back({merge->rank, at, merge->result});
      std::push_heap(scratch.heap_.begin(), scratch.heap_.end());
    }
  }

  void merge(Scratch& scratch) const {
    auto& symbols = scratch.symbols_;
    scratch.heap_.clear();
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      propose(scratch, static_cast<std::int32_t>(i));
    }
    while (!scratch.heap_.empty()) {
      std::pop_heap(scratch.heap_.begin(), scratch.heap_.end());
      const auto top = scratch.heap_.back();
      scratch.heap_.pop_back();
      Symbol& left = symbols[static_cast<std::size_t>(top.at)];
      if (left.gone || left.next < 0) continue;
      Symbol& right = symbols[static_cast<std::size_t>(left.next)];
      const auto* now = merges_.find(left.id, right.id);
      if (now == nullptr || now->result != top.result) continue;  // outdated by another merge
      left.id = top.result;
      left.next = right.next;
      right.gone = true;
      if (right.next >= 0) symbols[static_cast<std::size_t>(right.next)].previous = top.at;
      if (left.previous >= 0) propose(scratch, left.previous);
      propose(scratch, top.at);
    }
  }

  Vocabulary vocabulary_;
  MergeTable merges_;
  BpeOptions options_;
  std::array<std::int32_t, 0x400> low_{};  ///< ids of characters below U+0400, or -1
  std::array<std::int32_t, 256> bytes_{};  ///< ids of the <0xNN> tokens, or -1
};

}  // namespace block_streamer::inline v1
