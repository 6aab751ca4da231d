// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/core/block_layout.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

namespace block_streamer::inline v1 {

/// Names a layout inside one ViewCache.
enum class LayoutId : std::uint32_t {};

/// @brief The tensors over slots, built once per (slot address, layout) and reused by every visit.
/// Blocks whose tensors lie alike share one layout, so 64 equal blocks in 3 slots make 3 sets of
/// views. The views are normal tensors even when they are first asked for in InferenceMode.
/// **Threads.** Externally synchronised: the visiting thread's.
/// **Lifetime.** The memory of the slots outlives the cache and every tensor it gave out.
class ViewCache {
 public:
  explicit ViewCache(at::Device device) : device_{device} {}

  /// @brief Makes a layout known. @param order  indices into layout.tensors, as a WeightBinding has
  /// them; all of one `part`. Equal layouts get equal ids. **Cost.** linear in the layouts known.
  LayoutId add(const BlockLayout& layout, std::span<const std::uint32_t> order,
               std::uint32_t part = 0) {
    std::vector<TensorPlacement> tensors;
    for (const std::uint32_t index : order) {
      expects(index < layout.tensors.size() && layout.tensors[index].part == part,
              "the order names tensors of the part");
      tensors.push_back(layout.tensors[index]);
    }
    for (std::size_t i = 0; i < layouts_.size(); ++i) {
      if (lie_alike(layouts_[i], tensors)) return static_cast<LayoutId>(i);
    }
    layouts_.push_back(std::move(tensors));
    return static_cast<LayoutId>(layouts_.size() - 1);
  }

  /// @brief The tensors over `slot`, in the order given to add().
  /// **Cost.** One hash look-up; allocates only the first time. **Lifetime.** The span is valid
  /// until forget() of a slot that overlaps it.
  [[nodiscard]] std::span<const at::Tensor> views(std::span<std::byte> slot, LayoutId layout) {
    const auto index = static_cast<std::size_t>(layout);
    expects(index < layouts_.size(), "the layout is known to the cache");
    Slot& entry = slots_[slot.data()];
    if (entry.byte_count < slot.size()) entry.byte_count = slot.size();
    if (entry.sets.size() <= index) entry.sets.resize(layouts_.size());
    Set& set = entry.sets[index];
    if (!set.built) build(set, slot, layouts_[index]);
    return set.views;
  }

  /// @brief Call after the bytes of `slot` changed behind LibTorch's back: whoever saved a view
  /// over them for backward then fails there instead of computing with another block's weights.
  void refilled(std::span<const std::byte> slot) noexcept {
    for (auto& [base, entry] : slots_) {
      if (!overlap(base, entry.byte_count, slot)) continue;
      for (Set& set : entry.sets) {
        for (const at::Tensor& view : set.views) view.unsafeGetTensorImpl()->bump_version();
      }
    }
  }

  /// @brief Drops the views over `slot`, e.g. after a block tampered with them.
  void forget(std::span<const std::byte> slot) noexcept {
    for (auto& [base, entry] : slots_) {
      if (overlap(base, entry.byte_count, slot)) entry.sets.clear();
    }
  }

 private:
  struct Set {
    bool built = false;
    std::vector<at::Tensor> views;
  };
  struct Slot {
    std::uint64_t byte_count = 0;  ///< of the largest block seen there
    std::vector<Set> sets;         ///< by layout
  };

  static bool overlap(const std::byte* base, std::uint64_t byte_count,
                      std::span<const std::byte> slot) noexcept {
    const std::less<> before;
    return before(base, slot.data() + slot.size()) && before(slot.data(), base + byte_count);
  }

  static bool lie_alike(const std::vector<TensorPlacement>& a,
                        const std::vector<TensorPlacement>& b) noexcept {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (a[i].slot_offset != b[i].slot_offset || a[i].spec.dtype != b[i].spec.dtype ||
          a[i].spec.shape != b[i].spec.shape) {
        return false;
      }
    }
    return true;
  }

  void build(Set& set, std::span<std::byte> slot, const std::vector<TensorPlacement>& layout) {
    set.views.clear();
    set.views.reserve(layout.size());
    for (const TensorPlacement& tensor : layout) {
      expects(tensor.slot_offset <= slot.size() &&
                  tensor.byte_count <= slot.size() - tensor.slot_offset,
              "tensor " + tensor.spec.name + " lies inside its slot");
      set.views.push_back(
          view_of(slot.subspan(tensor.slot_offset, tensor.byte_count), tensor.spec, device_));
    }
    set.built = true;
  }

  at::Device device_;
  std::vector<std::vector<TensorPlacement>> layouts_;
  std::unordered_map<const std::byte*, Slot> slots_;
};

}  // namespace block_streamer::inline v1
