// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/generate/random_stream.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief How the next token is chosen from its logits.
/// With temperature T > 0, in this order:
/// 1. every logit is divided by T;
/// 2. the `top_k` largest stay (0: all); of equal ones at the border those with lower ids;
/// 3. softmax over what stayed; of the tokens in falling order of probability (equal ones by id)
/// the
///    shortest beginning stays whose sum is at least `top_p`, never fewer than one;
/// 4. one of them is drawn in proportion to its probability.
struct SamplingOptions {
  double temperature = 0;   ///< 0: greedy, the largest logit, of equal ones the lowest id
  std::uint64_t top_k = 0;  ///< 0: no limit
  double top_p = 1;         ///< in (0, 1]
  std::uint64_t seed = 0;
};

/// @throws UnsupportedError naming the option that is out of range.
inline void validate(const SamplingOptions& options) {
  if (!(std::isfinite(options.temperature) && options.temperature >= 0)) {
    throw UnsupportedError{"the temperature must be 0 (greedy) or a positive number, not " +
                           std::to_string(options.temperature)};
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw UnsupportedError{"top-p must lie in (0, 1], not " + std::to_string(options.top_p)};
  }
}

/// @brief The id of the largest logit, of equal ones the lowest.
/// @throws Error if one is not a number, or the largest is infinite. @pre there is a logit.
[[nodiscard]] inline std::int32_t greedy_token(std::span<const float> logits) {
  expects(!logits.empty(), "there is a logit to choose from");
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) {
      throw Error{"the model's logit of token " + std::to_string(i) + " is not a number"};
    }
    if (logits[i] > logits[best]) best = i;
  }
  if (!std::isfinite(logits[best])) {
    throw Error{"the model's largest logit, of token " + std::to_string(best) + ", is infinite"};
  }
  return static_cast<std::int32_t>(best);
}

/// @brief Chooses tokens one after another from one random stream.
/// **Threads.** One. **Cost.** Two passes over the logits; a sort of what top_k left, of a growing
/// beginning of it where only top_p limits.
class Sampler {
 public:
  /// @param stream  which of the seed's streams: the row of a batch.
  explicit Sampler(const SamplingOptions& options, std::uint64_t stream = 0)
      : options_{options}, random_{options.seed, stream} {
    validate(options);
  }

  /// @param logits  (V), finite or -infinity.
  /// @throws Error as greedy_token().
  [[nodiscard]] std::int32_t choose(std::span<const float> logits) {
    const std::int32_t best = greedy_token(logits);
    if (options_.temperature == 0) return best;
    const double largest = logits[static_cast<std::size_t>(best)];
    weights_.resize(logits.size());
    for (std::size_t i = 0; i < logits.size(); ++i) {
      weights_[i] = std::exp((logits[i] - largest) / options_.temperature);
    }
    order_.resize(logits.size());
    std::iota(order_.begin(), order_.end(), 0);
    return draw(keep());
  }

 private:
  /// Weights are exp of the divided logits, so their order is that of the logits.
  [[nodiscard]] bool before(std::int32_t a, std::int32_t b) const {
    const double x = weights_[static_cast<std::size_t>(a)];
    const double y = weights_[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  }
  /// Brings the `count` first into order at the beginning. @pre the first `sorted` are there.
  void sort_first(std::size_t sorted, std::size_t count) {
    const auto at = [this](std::size_t i) {
      return order_.begin() + static_cast<std::ptrdiff_t>(i);
    };
    std::partial_sort(at(sorted), at(count), order_.end(),
                      [this](std::int32_t a, std::int32_t b) { return before(a, b); });
  }
  [[nodiscard]] double weight(std::size_t place) const {
    return weights_[static_cast<std::size_t>(order_[place])];
  }

  /// How many stay, in order at the beginning of order_.
  [[nodiscard]] std::size_t keep() {
    const std::size_t all = order_.size();
    const std::size_t most =
        options_.top_k == 0
            ? all
            : static_cast<std::size_t>(std::min<std::uint64_t>(options_.top_k, all));
    if (options_.top_p == 1) {
      sort_first(0, most < all ? most : 0);
      return most;
    }
    std::size_t sorted = most < all ? most : 0;
    sort_first(0, sorted);
    double total = 0;
    for (std::size_t i = 0; i < most; ++i) total += weight(i);
    double sum = 0;
    for (std::size_t i = 0; i < most; ++i) {
      if (i == sorted) {  // the beginning is short as a rule: do not sort a whole vocabulary for it
        const std::size_t next = std::min(most, std::max<std::size_t>(64, 4 * sorted));
        sort_first(sorted, next);
        sorted = next;
      }
      sum += weight(i);
      if (sum >= options_.top_p * total) return i + 1;
    }
    return most;
  }

  [[nodiscard]] std::int32_t draw(std::size_t count) {
    double total = 0;
    for (std::size_t i = 0; i < count; ++i) total += weight(i);
    const double wanted = random_.uniform() * total;
    double sum = 0;
    std::size_t last = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (weight(i) == 0) continue;  // a token of probability 0 is never drawn
      last = i;
      sum += weight(i);
      if (wanted < sum) break;
    }
    return order_[last];
  }

  SamplingOptions options_;
  RandomStream random_;
  std::vector<double> weights_;
  std::vector<std::int32_t> order_;
};

}  // namespace block_streamer::inline v1
