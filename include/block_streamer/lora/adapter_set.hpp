// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/adapter_table.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/lora/lora_projection.hpp>
#include <block_streamer/lora/summed_projection.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Several adapters of one list of blocks, by name; those that are active add up, each with
/// a weight. What PEFT does with several adapters and set_adapter().
/// @code
///   AdapterSet set{lora_blocks};
///   set.add("style", load_adapter(folder, lora_blocks, device));
///   set.add("facts", load_adapter(other, lora_blocks, device));
///   set.activate({"facts"});                       // this one alone
///   streamer.attach(set.table());
///   set.activate({"style", "facts"});              // their sum
///   set.set_weight("style", 0.5);
///   streamer.attach(set.table("facts"));           // "facts" trains, "style" is added as it is
/// @endcode
/// Nothing of it reaches a streamer before the next attach().
/// **Threads.** Externally synchronised. **Lifetime.** Tables share the adapters' tensors and need
/// nothing else of it.
class AdapterSet {
 public:
  /// @param blocks  the list that all adapters are made for.
  explicit AdapterSet(std::vector<LoraBlock> blocks) : blocks_{std::move(blocks)} {}

  /// @brief Adds an adapter; it is not active yet. @param weight  factor on what it adds, finite.
  /// @throws BindingError for a name that is there already.
  void add(std::string name, LoraAdapter adapter, double weight = 1) {
    expects(adapter.block_count() == blocks_.size(),
            "the adapters of a set are made for its blocks");
    expects(std::isfinite(weight), "the weight of an adapter is finite");
    if (find(name) != entries_.size())
      throw BindingError{"there is an adapter \"" + name + "\" already"};
    entries_.push_back({std::move(name), std::move(adapter), weight});
  }
  /// @brief Changes the factor on what an adapter adds. @throws BindingError as at().
  void set_weight(const std::string& name, double weight) {
    expects(std::isfinite(weight), "the weight of an adapter is finite");
    entry(name).weight = weight;
  }

  /// @brief These are active from now on, and no others; they are added in this order. None: the
  /// base alone.
  /// @throws BindingError as at(), and for a name twice; then nothing has changed.
  void activate(const std::vector<std::string>& names) {
    std::vector<std::size_t> chosen;
    for (const std::string& name : names) {
      chosen.push_back(index(name));
      if (std::ranges::count(chosen, chosen.back()) > 1)
        throw BindingError{"adapter \"" + name + "\" is named twice"};
    }
    active_ = std::move(chosen);
  }

  /// @throws BindingError naming what there is, if there is no adapter of that name.
  [[nodiscard]] const LoraAdapter& at(const std::string& name) const {
    return entries_[index(name)].adapter;
  }
  /// @brief All names, in the order of add().
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const Entry& entry : entries_) all.push_back(entry.name);
    return all;
  }
  /// @brief Names of the active ones, in the order in which they are added.
  [[nodiscard]] std::vector<std::string> active() const {
    std::vector<std::string> all;
    for (const std::size_t i : active_) all.push_back(entries_[i].name);
    return all;
  }

  /// @brief What a streamer takes: the sum of the active adapters, none of which trains.
  [[nodiscard]] AdapterTable table() { return table_of(entries_.size()); }
  /// @brief The same, and `trained` is what trains.
  /// Tensors of that one require a gradient afterwards, those of all others do not.
  /// @throws BindingError as at(); ContractViolation if it is not active.
  [[nodiscard]] AdapterTable table(const std::string& trained) {
    const std::size_t chosen = index(trained);
    expects(std::ranges::count(active_, chosen) == 1, "an adapter that trains is active");
    return table_of(chosen);
  }

 private:
  struct Entry {
    std::string name;
    LoraAdapter adapter;
    double weight = 1;
  };

  [[nodiscard]] std::size_t find(const std::string& name) const {
    const auto found = std::ranges::find(entries_, name, &Entry::name);
    return static_cast<std::size_t>(found - entries_.begin());
  }
  [[nodiscard]] std::size_t index(const std::string& name) const {
    const std::size_t found = find(name);
    if (found < entries_.size()) return found;
    std::string known;
    for (const Entry& entry : entries_) known += (known.empty() ? "" : ", ") + entry.name;
    throw BindingError{"there is no adapter \"" + name + "\"" +
                       (known.empty() ? ", and no other" : ", but " + known)};
  }
  [[nodiscard]] Entry& entry(const std::string& name) { return entries_[index(name)]; }

  [[nodiscard]] AdapterTable table_of(std::size_t trained) {
    std::vector<std::vector<std::vector<LowRankTerm>>> terms(blocks_.size());  // block, weight
    for (std::size_t b = 0; b < blocks_.size(); ++b) terms[b].resize(blocks_[b].specs.size());
    for (const std::size_t i : active_) {
      const auto& [name, adapter, weight] = entries_[i];
      for (const LoraModule& module : adapter.modules()) {
        const double scale =
            weight * lora_scale(module.alpha, module.rank, adapter.options().use_rslora);
        terms[module.site.block]
            .at(module.site.weight)
            .push_back({module.a, module.b, scale, adapter.options().dropout});
      }
    }
    AdapterTable table;
    table.blocks.resize(blocks_.size());
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      table.blocks[b].by_weight.resize(terms[b].size());
      for (std::size_t w = 0; w < terms[b].size(); ++w)
        table.blocks[b].by_weight[w] = projection_of(std::move(terms[b][w]));
    }
    mark_trained(table, trained);
    return table;
  }
  [[nodiscard]] static std::unique_ptr<ProjectionAdapter> projection_of(
      std::vector<LowRankTerm> terms) {
    if (terms.empty()) return nullptr;
    if (terms.size() > 1) return std::make_unique<SummedProjection>(std::move(terms));
    const LowRankTerm& only = terms.front();
    return std::make_unique<LoraProjection>(only.a, only.b, only.scale, only.dropout);
  }
  void mark_trained(AdapterTable& table, std::size_t trained) {
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      for (const LoraModule& module : entries_[i].adapter.modules()) {
        module.a.set_requires_grad(i == trained);
        module.b.set_requires_grad(i == trained);
        if (i != trained) continue;
        auto& parameters = table.blocks[module.site.block].parameters;
        parameters.insert(parameters.end(), {module.a, module.b});
      }
    }
  }

  std::vector<LoraBlock> blocks_;
  std::vector<Entry> entries_;
  std::vector<std::size_t> active_;  ///< indices of entries, in the order in which they are added
};

}  // namespace block_streamer::inline v1
