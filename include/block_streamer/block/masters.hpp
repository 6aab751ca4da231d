// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// One of the caller's tensors that blocks are streamed from. Known once, however many blocks use
/// it.
struct Master {
  at::Tensor tensor;
  std::string name;             ///< for messages: "block 3, fc1.weight"
  BlockId owner{};              ///< the first block that uses it: its gradient is whole after that
  std::uint32_t use_count = 0;  ///< blocks that use it
  const void* data = nullptr;   ///< where its bytes must stay
};

/// @brief The caller's own tensors, block by block: what a RAM tier over them was made of, what
/// trains, and how to see that somebody changed them.
/// **Threads.** As the tensors: reading while nobody writes.
class Masters {
 public:
  /// @param blocks  per block, in the order of its stored tensors. One tensor may belong to several
  /// blocks.
  /// @throws UnsupportedError naming block and tensor for what cannot be streamed in place: tensors
  /// on another device, meta or sparse or inference tensors, strides, two tensors over one storage.
  explicit Masters(std::span<const std::vector<NamedTensor>> blocks) {
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      blocks_.emplace_back();
      for (const NamedTensor& named : blocks[b]) add(block_at(b), named);
    }
  }

  [[nodiscard]] std::size_t block_count() const noexcept { return blocks_.size(); }
  [[nodiscard]] std::span<const Master> all() const noexcept { return masters_; }
  [[nodiscard]] const Master& operator[](std::uint32_t master) const { return masters_[master]; }
  /// @brief The masters of a block, in the order of its stored tensors.
  [[nodiscard]] std::span<const std::uint32_t> of(BlockId block) const {
    return blocks_[index_of(block)];
  }
  [[nodiscard]] bool any_trains() const {
    for (const Master& master : masters_) {
      if (master.tensor.requires_grad()) return true;
    }
    return false;
  }

  /// @brief Takes the present addresses for those where the masters stay.
  void settle() {
    for (Master& master : masters_) master.data = master.tensor.const_data_ptr();
  }
  /// @throws ContractViolation naming the first master that no longer lies where it was (a module's
  /// to(), torch::load, set_data): what is streamed would be the old bytes.
  void check_in_place() const {
    for (const Master& master : masters_) {
      if (master.tensor.const_data_ptr() == master.data) continue;
      throw ContractViolation{master.name +
                              " has new memory since its storage was made (a module's to(), "
                              "torch::load or set_data): make a new storage and streamer, or load "
                              "before they are made"};
    }
  }

 private:
  static void check(const NamedTensor& named, const std::string& name) {
    const at::Tensor& tensor = named.tensor;
    const auto refuse = [&](const char* why) { throw UnsupportedError{name + " " + why}; };
    if (!tensor.defined()) refuse("is undefined");
    if (tensor.is_meta()) refuse("is a meta tensor: it has no bytes to stream");
    if (tensor.layout() != at::kStrided) refuse("is sparse: only dense tensors are streamed");
    if (!tensor.device().is_cpu()) refuse("is not in host memory");
    if (tensor.is_inference()) refuse("was made in inference mode: changes of it go unseen");
    if (!tensor.is_contiguous()) refuse("is not contiguous");
    if (!tensor.is_leaf()) refuse("is computed from other tensors: parameters are leaf tensors");
    if (tensor.storage_offset() != 0 || tensor.storage().nbytes() != tensor.nbytes())
      refuse("is a part of another tensor's storage: give it one of its own");
  }
  void add(BlockId block, const NamedTensor& named) {
    const std::string name = to_string(PartId{block}) + ", " + named.name;
    check(named, name);
    auto& of_block = blocks_[index_of(block)];
    for (std::uint32_t i = 0; i < masters_.size(); ++i) {
      Master& known = masters_[i];
      if (known.tensor.is_same(named.tensor)) {
        for (const std::uint32_t other : of_block)
          expects(other != i, name + " is listed twice for its block");
        of_block.push_back(i);
        ++known.use_count;
        return;
      }
      if (named.tensor.nbytes() > 0 && known.tensor.is_alias_of(named.tensor))
        throw UnsupportedError{name + " and " + known.name +
                               " are distinct tensors over one storage: share the tensor itself"};
    }
    of_block.push_back(static_cast<std::uint32_t>(masters_.size()));
    masters_.push_back({named.tensor, name, block, 1, named.tensor.const_data_ptr()});
  }

  std::vector<Master> masters_;
  std::vector<std::vector<std::uint32_t>> blocks_;
};

}  // namespace block_streamer::inline v1
