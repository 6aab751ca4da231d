// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/masters.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/pipeline/copy_out.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Page-locked host memory for one gradient of every master that trains: the device copies
/// into it, and it becomes the master's .grad, again and again as long as the caller lets go of it
/// (zero_grad) in between.
/// **Lifetime.** A .grad keeps the memory alive. **Cost.** As many bytes as the masters that train,
/// taken at the first use.
template <execution_backend Backend>
class GradientHome {
 public:
  /// @brief The place of this master's gradient, if there is one that nobody uses; else undefined.
  [[nodiscard]] at::Tensor take(Backend& backend, const Masters& masters, std::uint32_t master) {
    if (places_.empty()) build(backend, masters);
    const at::Tensor& place = places_[master];
    if (!place.defined() || place.storage().use_count() > 1) return {};
    const c10::InferenceMode normal_mode{false};
    return place.detach();
  }

 private:
  using Memory = LockedMemory<Backend>;

  void build(Backend& backend, const Masters& masters) {
    std::vector<std::uint64_t> begins(masters.all().size());
    std::uint64_t end = 0;
    for (std::uint32_t m = 0; m < begins.size(); ++m) {
      if (!lives_here(masters[m])) continue;
      begins[m] = round_up(end, tensor_alignment);
      end = begins[m] + masters[m].tensor.nbytes();
    }
    const auto memory = std::make_shared<Memory>(backend, end);  // shared with the tensors in it
    std::vector<at::Tensor> places(begins.size());
    const c10::InferenceMode normal_mode{false};
    for (std::uint32_t m = 0; m < begins.size(); ++m) {
      const at::Tensor& master = masters[m].tensor;
      if (!lives_here(masters[m])) continue;
      places[m] = at::for_blob(memory->bytes().data() + begins[m], master.sizes())
                      .options(master.options().requires_grad(false))
                      .deleter([memory](void*) {})
                      .make_tensor();
    }
    places_ = std::move(places);
  }
  /// Gradients of several uses are summed elsewhere first.
  [[nodiscard]] static bool lives_here(const Master& master) {
    return master.tensor.requires_grad() && master.use_count == 1 && master.tensor.nbytes() > 0;
  }

  std::vector<at::Tensor> places_;  ///< per master; undefined for those that did not train then
};

}  // namespace block_streamer::inline v1
