// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/name_pattern.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/lora/target_matching.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {
namespace detail {

/// The value of the first pattern that matches the end of a module's name, as PEFT looks it up.
template <class Value>
[[nodiscard]] Value pattern_value(const std::vector<std::pair<std::string, Value>>& patterns,
                                  const std::string& module, Value otherwise,
                                  const std::string& where) {
  for (const auto& [pattern, value] : patterns) {
    if (NamePattern{pattern, where, NamePattern::Extent::end}.matches(module)) return value;
  }
  return otherwise;
}

/// Every pattern must have something to say: one that matches no module is a slip of the pen.
template <class Value>
void expect_patterns_match(const std::vector<std::pair<std::string, Value>>& patterns,
                           const std::vector<LoraSite>& chosen, const std::string& where) {
  for (const auto& [pattern, value] : patterns) {
    const NamePattern expression{pattern, where, NamePattern::Extent::end};
    const bool some = std::any_of(chosen.begin(), chosen.end(), [&](const LoraSite& site) {
      return expression.matches(site.module);
    });
    if (!some) throw BindingError{where + ": \"" + pattern + "\" matches no adapted module"};
  }
}

}  // namespace detail

/// @brief The sites whose whole name a regular expression matches, in list order: PEFT's rule for
/// targets that are one string.
/// @throws FormatError if it is no expression; BindingError if it matches nothing.
[[nodiscard]] inline std::vector<LoraSite> match_target_pattern(const std::vector<LoraSite>& sites,
                                                                const std::string& pattern) {
  const NamePattern expression{pattern, "LoRA target pattern"};
  std::vector<LoraSite> matched;
  for (const LoraSite& site : sites) {
    if (expression.matches(site.module)) matched.push_back(site);
  }
  if (matched.empty()) {
    throw BindingError{"LoRA target pattern \"" + pattern +
                       "\" matches the whole name of no linear map of the model" +
                       (sites.empty() ? "" : ", such as " + sites.front().module)};
  }
  return matched;
}

}  // namespace block_streamer::inline v1
