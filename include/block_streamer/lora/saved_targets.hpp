// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/lora/target_matching.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace block_streamer::inline v1 {

/// How an adapter's files name its modules: `target_modules` and `layers_to_transform` of PEFT.
struct SavedTargets {
  std::vector<std::string> modules;                  ///< sorted
  std::optional<std::vector<std::uint64_t>> layers;  ///< absent: all that the modules match
};

namespace detail {
/// True if the names and layers pick exactly `chosen` out of `sites`, both in list order.
[[nodiscard]] inline bool picks_exactly(const SavedTargets& saved,
                                        const std::vector<LoraSite>& sites,
                                        const std::vector<LoraSite>& chosen) {
  std::size_t next = 0;
  for (const LoraSite& site : sites) {
    const auto names = [&site](const std::string& target) { return is_target(site, target); };
    bool picked = std::any_of(saved.modules.begin(), saved.modules.end(), names);
    if (saved.layers)
      picked = picked && site.layer &&
               std::binary_search(saved.layers->begin(), saved.layers->end(), *site.layer);
    const bool wanted = next < chosen.size() && chosen[next].module == site.module;
    if (picked != wanted) return false;
    if (wanted) ++next;
  }
  return next == chosen.size();
}
}  // namespace detail

/// @brief The shortest way to say `chosen`: last name components with the layers, then names within
/// the block, else every full name.
[[nodiscard]] inline SavedTargets saved_targets_of(const std::vector<LoraSite>& sites,
                                                   const std::vector<LoraSite>& chosen) {
  std::set<std::string> last;
  std::set<std::string> relative;
  std::set<std::string> full;
  std::set<std::uint64_t> layers;
  for (const LoraSite& site : chosen) {
    last.emplace(detail::last_component(site.module));
    relative.insert(site.relative);
    full.insert(site.module);
    if (site.layer) layers.insert(*site.layer);
  }
  for (const auto* names : {&last, &relative}) {
    SavedTargets saved{.modules = {names->begin(), names->end()}, .layers = {}};
    if (detail::picks_exactly(saved, sites, chosen)) return saved;
    saved.layers.emplace(layers.begin(), layers.end());
    if (detail::picks_exactly(saved, sites, chosen)) return saved;
  }
  return {.modules = {full.begin(), full.end()}, .layers = {}};
}

}  // namespace block_streamer::inline v1
