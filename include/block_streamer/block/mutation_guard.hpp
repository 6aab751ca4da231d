// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Sees whether a block wrote, resized or replaced the weights that it was lent for a visit.
/// Writes are seen through the version counter, so those made through `.data()` copies or raw
/// pointers are not. Kept by the streamer and armed for each visit: no allocation after the first.
/// **Threads.** The visiting thread's.
class MutationGuard {
 public:
  /// @brief Remembers the state of `weights`, which stay alive until check().
  void arm(std::span<const at::Tensor> weights) {
    states_.clear();
    sizes_.clear();
    for (const at::Tensor& weight : weights) {
      states_.push_back({weight.unsafeGetTensorImpl(), weight.const_data_ptr(), weight._version(),
                         weight.dim(), weight.is_contiguous()});
      sizes_.insert(sizes_.end(), weight.sizes().begin(), weight.sizes().end());
    }
  }

  /// @brief The index of the first weight changed since arm(), or the number of weights.
  [[nodiscard]] std::size_t first_changed(std::span<const at::Tensor> weights) const {
    expects(weights.size() == states_.size(),
            "the weights are those that the guard was armed with");
    const std::int64_t* sizes = sizes_.data();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const State& state = states_[i];
      const at::Tensor& weight = weights[i];
      if (weight.unsafeGetTensorImpl() != state.impl || weight.const_data_ptr() != state.data ||
          weight._version() != state.version || weight.dim() != state.dim ||
          !weight.sizes().equals({sizes, static_cast<std::size_t>(state.dim)}) ||
          weight.is_contiguous() != state.contiguous) {
        return i;
      }
      sizes += state.dim;
    }
    return weights.size();
  }

  /// @throws ContractViolation naming the block and the weight if one was changed since arm(). The
  /// slot's bytes and its views are then no longer to be trusted: fetch the block again and forget
  /// the views.
  void check(BlockId block, std::span<const at::Tensor> weights,
             std::span<const std::string> names) const {
    const std::size_t changed = first_changed(weights);
    if (changed == weights.size()) return;
    const std::string name =
        changed < names.size() ? names[changed] : "weight " + std::to_string(changed);
    throw ContractViolation{
        "block " + std::to_string(index_of(block)) + " changed its weight " + name +
        " in place; weights are lent for the visit and may only be read (clone them first)"};
  }

 private:
  struct State {
    const void* impl;
    const void* data;
    std::int64_t version;
    std::int64_t dim;
    bool contiguous;
  };
  std::vector<State> states_;
  std::vector<std::int64_t> sizes_;
};

/// @brief True if `tensor`'s storage shares a byte with `memory`. Addresses only: works for device
/// memory. False for tensors without storage or elements.
[[nodiscard]] inline bool overlaps(const at::Tensor& tensor, std::span<const std::byte> memory) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0 || memory.empty())
    return false;
  const auto* begin = static_cast<const std::byte*>(tensor.storage().data());
  const std::less<> before;
  return before(begin, memory.data() + memory.size()) &&
         before(memory.data(), begin + tensor.storage().nbytes());
}

/// @brief The output of a visit, safe to keep: a copy if it shares memory with the slot, which the
/// next block will overwrite, else the same tensor.
[[nodiscard]] inline at::Tensor detached_from(std::span<const std::byte> slot, at::Tensor output) {
  if (!overlaps(output, slot)) return output;
  return at::clone(output);
}

}  // namespace block_streamer::inline v1
