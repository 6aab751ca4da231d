// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace block_streamer::inline v1::detail {

/// @brief Inside, operations go straight to their kernels: no graph, no version counters, no
/// autocast, views are plain tensors. For what writes only tensors that it has just made itself.
class PlainMath {
 private:
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::impl::ExcludeDispatchKeyGuard uncast_{c10::autocast_dispatch_keyset};
};

/// @brief The matrix mᵀ as a view, in one operation instead of three. m: (rows, columns).
[[nodiscard]] inline at::Tensor transposed(const at::Tensor& m) {
  return at::as_strided(m, {m.size(1), m.size(0)}, {m.stride(1), m.stride(0)});
}

/// @brief x in another type, dense; x itself if it has that type. Two operations instead of four.
[[nodiscard]] inline at::Tensor cast(const at::Tensor& x, at::ScalarType dtype) {
  if (x.scalar_type() == dtype) return x;
  return at::empty(x.sizes(), x.options().dtype(dtype)).copy_(x);
}

/// @brief x in another shape: a view if it is dense, in one operation instead of two.
[[nodiscard]] inline at::Tensor reshaped(const at::Tensor& x, at::IntArrayRef sizes) {
  return x.is_contiguous() ? x.view(sizes) : x.reshape(sizes);
}

/// @brief A part of the graph whose gradients are written out by hand. A chain of single operations
/// gives the same sums, but on the host its bookkeeping costs more than a block's kernels do on the
/// device, and that is what a step waits for.
/// Saved tensors are checked for changes in place and freed with the graph, as LibTorch's own are.
/// A second derivative is refused.
/// **Threads.** As torch::autograd::Node: one apply() at a time.
class GradientNode : public torch::autograd::Node {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// @param inputs  whose gradients pull() gives, in order; undefined or constant ones are never
  /// wanted.
  explicit GradientNode(std::span<const at::Tensor> inputs) : Node{edges_to(inputs)} {}

  void release_variables() override {
    saved_.clear();
    own_.clear();
    released_ = true;
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (c10::GradMode::is_enabled())
      throw ContractViolation{name() + " has no second derivative (create_graph=true)"};
    if (released_)
      throw ContractViolation{name() +
                              " has run and freed what it saved; keep it with retain_graph=true"};
    Tensors saved;
    saved.reserve(saved_.size());
    for (const torch::autograd::SavedVariable& one : saved_) saved.push_back(one.unpack());
    bool reached = false;
    for (const at::Tensor& gradient : gradients) reached = reached || gradient.defined();
    if (!reached) return Tensors(num_outputs());
    const PlainMath plain;
    return pull(gradients, saved);
  }

  /// @brief Saves a tensor that others may know, for pull(). Undefined ones keep their place.
  void save(const at::Tensor& tensor) { saved_.emplace_back(tensor, /*is_output=*/false); }
  /// @brief Saves a tensor that nobody else knows.
  void save_own(at::Tensor tensor) { own_.push_back(std::move(tensor)); }

 protected:
  /// @brief From the gradients of the outputs, some undefined, to those of the inputs. Runs as
  /// PlainMath; gradients it is given must not be written.
  /// @param saved  what save() was given, in order.
  [[nodiscard]] virtual Tensors pull(const Tensors& gradients, const Tensors& saved) = 0;

  /// @brief What save_own() was given.
  [[nodiscard]] const at::Tensor& own(std::size_t index) const { return own_.at(index); }
  /// @brief True if the running backward needs the gradient of that input.
  [[nodiscard]] bool wants(std::size_t input) const { return task_should_compute_output(input); }

 private:
  [[nodiscard]] static torch::autograd::edge_list edges_to(std::span<const at::Tensor> inputs) {
    torch::autograd::edge_list edges;
    edges.reserve(inputs.size());
    for (const at::Tensor& input : inputs) {
      edges.push_back(input.defined() ? torch::autograd::impl::gradient_edge(input)
                                      : torch::autograd::Edge{});
    }
    return edges;
  }

  std::vector<torch::autograd::SavedVariable> saved_;
  Tensors own_;
  bool released_ = false;
};

/// @brief True if a result of these inputs belongs into the graph.
[[nodiscard]] inline bool is_recorded(std::span<const at::Tensor> inputs) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) return true;
  }
  return false;
}

/// @brief A node on the heap, as autograd wants to own it.
template <class Node, class... Arguments>
[[nodiscard]] std::shared_ptr<Node> make_node(Arguments&&... arguments) {
  return {new Node(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode};
}

/// @brief Makes `output` the node's next output.
inline void append_output(const at::Tensor& output, const std::shared_ptr<GradientNode>& node) {
  torch::autograd::set_history(output, node);
}

}  // namespace block_streamer::inline v1::detail
