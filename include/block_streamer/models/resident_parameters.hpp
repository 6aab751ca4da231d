// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/core/dtype.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/models/decoder_model.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::models {

/// @brief What of a decoder model is no block, as parameters that train: embedding, final norm and
/// head; a tied head is the embedding, and the gradients of both uses are summed.
/// The parameters are fp32 masters on the model's device. Where the model computes in fp32 they are
/// its own tensors, else refresh() brings them into those.
/// The gradient of the head and the norm comes from a backward through the model's logits(); the
/// embedding's is given, since it is a sum whose order is then the caller's.
/// **Threads.** Externally synchronised. **Lifetime.** Shares the model's tensors.
/// **Cost.** On the device, in elements of the three: 4 bytes for masters where the model computes
/// in another type, 4 for gradients, and the computed type's for gradients on their way.
class ResidentParameters {
 public:
  /// @pre embedding and head are resident.
  explicit ResidentParameters(const DecoderModel& model) {
    expects(model.embedding_is_resident() && model.head_is_resident(),
            "embedding and head train only where they are resident");
    add(model, model.layout().embedding, model.embedding());
    add(model, model.layout().final_norm, model.final_norm());
    if (!model.layout().tied) add(model, model.layout().head, model.head());
  }

  /// @brief The masters under their names in the checkpoint: the embedding first, then those of the
  /// blocks, final norm and head last, as a forward meets them.
  [[nodiscard]] NamedTensors around(NamedTensors blocks) const {
    NamedTensors all{{all_[0].name, all_[0].master}};
    for (NamedTensor& block : blocks) all.push_back(std::move(block));
    for (std::size_t i = 1; i < all_.size(); ++i) all.push_back({all_[i].name, all_[i].master});
    return all;
  }

  /// @brief After a backward through logits(): its gradients are added to those of the masters, in
  /// fp32.
  void collect() {
    const c10::NoGradGuard no_grad;
    for (const Resident& one : all_) {
      if (one.master.is_same(one.computed) || !one.computed.grad().defined()) continue;
      add_gradient(one.master, one.computed.grad().to(one.master.scalar_type()));
      one.computed.mutable_grad() = at::Tensor{};
    }
  }
  /// @brief Adds the embedding's gradient for tokens that were looked up.
  /// @param ids  (…), i64. @param gradient  (…,C), of their rows, on the model's device.
  void add_embedding_gradient(const at::Tensor& ids, const at::Tensor& gradient) {
    const c10::NoGradGuard no_grad;
    const at::Tensor& master = all_[0].master;
    add_gradient(master, at::embedding_dense_backward(gradient.to(master.scalar_type()),
                                                      ids.to(gradient.device()), master.size(0),
                                                      /*padding_idx=*/-1, false));
  }
  /// @brief Gradients that no step will use.
  void drop_gradients() {
    for (const Resident& one : all_) {
      one.master.mutable_grad() = at::Tensor{};
      one.computed.mutable_grad() = at::Tensor{};
    }
  }
  /// @brief The masters have changed: the model computes with what they are now.
  void refresh() {
    const c10::NoGradGuard no_grad;
    for (const Resident& one : all_) {
      if (!one.master.is_same(one.computed)) one.computed.copy_(one.master);
    }
  }

 private:
  struct Resident {
    std::string name;
    at::Tensor computed;  ///< the model's
    at::Tensor master;    ///< fp32; the same where the model computes in fp32
  };

  void add(const DecoderModel& model, const std::string& name, at::Tensor computed) {
    computed.set_requires_grad(true);
    at::Tensor master = computed;
    if (model.dtype() != DType::f32)
      master = load_tensor(model.checkpoint(), name, DType::f32, model.device());
    all_.push_back({name, std::move(computed), std::move(master)});
  }
  static void add_gradient(const at::Tensor& master, const at::Tensor& gradient) {
    at::Tensor& sum = master.mutable_grad();
    if (sum.defined()) {
      sum.add_(gradient);
    } else {
      sum = gradient;
    }
  }

  std::vector<Resident> all_;
};

}  // namespace block_streamer::inline v1::models
