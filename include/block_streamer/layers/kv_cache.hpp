// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace block_streamer::inline v1 {

struct KvCacheShape {
  std::int64_t layers = 0;
  std::int64_t batch = 0;
  std::int64_t kv_heads = 0;
  std::int64_t capacity = 0;  ///< tokens per sequence
  std::int64_t head_dim = 0;
};

/// @brief Keys and values of the tokens seen so far, for every layer, at fixed addresses.
/// One allocation of 2·L·B·Nk·capacity·D elements (see byte_count()), never grown or moved; memory
/// of tokens not yet seen is not touched. Keys are stored after norm and rotation.
/// **Threads.** Externally synchronised.
class KvCache {
 public:
  KvCache(const KvCacheShape& shape, at::ScalarType dtype, at::Device device)
      : shape_{shape}, lengths_(static_cast<std::size_t>(shape.layers), 0) {
    expects(shape.layers > 0 && shape.batch > 0 && shape.kv_heads > 0 && shape.capacity > 0 &&
                shape.head_dim > 0,
            "the sizes of a KV cache are positive");
    // A cache made in inference mode could not be filled outside it.
    const c10::InferenceMode normal_mode{false};
    memory_ =
        at::empty({shape.layers, 2, shape.batch, shape.kv_heads, shape.capacity, shape.head_dim},
                  at::TensorOptions{}.dtype(dtype).device(device));
  }

  struct Prefix {
    at::Tensor keys;    ///< (B,Nk,past+T,D), a view
    at::Tensor values;  ///< alike
  };

  /// @brief Writes the tokens that follow the first `past` of a layer and returns all of them. What
  /// the layer held beyond `past` is forgotten, so a pass that failed halfway is simply repeated.
  /// keys, values: (B,Nk,T,D).
  /// @throws ContractViolation if the tokens do not fit, shapes differ, `past` leaves a gap, or
  /// grad mode is on.
  Prefix append(std::size_t layer, std::int64_t past, const at::Tensor& keys,
                const at::Tensor& values) {
    expects(!c10::GradMode::is_enabled(), "a KV cache is used without grad");
    expects(layer < lengths_.size() && past >= 0 && past <= lengths_[layer],
            "the appended tokens follow those in the cache");
    const std::int64_t tokens = keys.size(2);
    expects(past + tokens <= shape_.capacity, "the KV cache has room for the tokens");
    expects(keys.size(0) == shape_.batch && keys.size(1) == shape_.kv_heads &&
                keys.size(3) == shape_.head_dim && keys.sizes() == values.sizes(),
            "keys and values have the shape of the KV cache");
    const at::Tensor pair = memory_.select(0, static_cast<std::int64_t>(layer));
    const at::Tensor all_keys = pair.select(0, 0);    // (B,Nk,capacity,D)
    const at::Tensor all_values = pair.select(0, 1);  // alike
    all_keys.narrow(2, past, tokens).copy_(keys);
    all_values.narrow(2, past, tokens).copy_(values);
    lengths_[layer] = past + tokens;
    return {all_keys.narrow(2, 0, past + tokens), all_values.narrow(2, 0, past + tokens)};
  }

  /// @brief Tokens that every layer holds: where the next pass continues.
  [[nodiscard]] std::int64_t length() const noexcept {
    return *std::min_element(lengths_.begin(), lengths_.end());
  }
  /// @brief Forgets all tokens from the `length`-th on. @pre length() holds as many.
  void truncate(std::int64_t length) {
    expects(length >= 0 && length <= this->length(), "a KV cache is only cut shorter");
    std::fill(lengths_.begin(), lengths_.end(), length);
  }

  [[nodiscard]] const KvCacheShape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::int64_t capacity() const noexcept { return shape_.capacity; }
  /// @brief Memory reserved, in bytes.
  [[nodiscard]] std::size_t byte_count() const { return memory_.nbytes(); }

 private:
  KvCacheShape shape_;
  at::Tensor memory_;  ///< (L,2,B,Nk,capacity,D)
  std::vector<std::int64_t> lengths_;
};

}  // namespace block_streamer::inline v1
