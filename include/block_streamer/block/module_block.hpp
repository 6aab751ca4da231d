// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/block_result.hpp>
#include <block_streamer/block/no_context.hpp>
#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

namespace detail {
/// The module class behind a holder made by TORCH_MODULE, or the class itself.
template <class Module>
struct HeldModule {
  using Type = Module;
};
template <class Module>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Module>
struct HeldModule<Module> {
  using Type = typename Module::ContainedType;
};
template <class T>
inline constexpr bool is_tuple = false;
template <class... T>
inline constexpr bool is_tuple<std::tuple<T...>> = true;

template <class Module, class Context>
auto call_module(Module& module, const at::Tensor& hidden, [[maybe_unused]] Context& context) {
  if constexpr (std::same_as<Context, NoContext>) {
    return module.forward(hidden);
  } else {
    return module.forward(hidden, context);
  }
}
}  // namespace detail

/// @brief Any torch::nn module as a block: its parameters and registered buffers are what streams,
/// under the names that the module gives them; a tensor registered twice streams once. During a
/// visit the module's tensors show the bytes of the slot, so its code stays as it is. Tensors that
/// it keeps without registering them are not known, and stay where they are.
/// The module's forward takes one tensor (and the context, unless that is NoContext) and returns
/// one, or a tuple whose first element goes on. Of the list's last module a streamer returns the
/// whole tuple, if it is one of tensors; the other elements are dropped.
/// It is set to training or evaluation as the streamer is, when it differs; parts of it may be
/// switched otherwise, but not between a forward and its backward. A module that writes
/// its own tensors in a forward (running statistics in training) is refused by the name of the
/// tensor.
/// @tparam Module  a module class or its holder. @tparam ContextType  @see streamable_block
/// **Threads.** The visitor's; nobody else reads the module's tensors during a visit.
/// **Lifetime.** Shares the module. **Cost.** A few small allocations a visit and tensor.
template <class Module, class ContextType = NoContext>
class ModuleBlock {
 public:
  using Hidden = at::Tensor;
  using Context = ContextType;
  using Held = typename detail::HeldModule<Module>::Type;
  using Output = decltype(detail::call_module(
      std::declval<Held&>(), std::declval<const at::Tensor&>(), std::declval<Context&>()));
  /// @see resulting_block, which a module is that returns a tuple of tensors
  using Result = std::conditional_t<detail::is_tensor_tuple<Output>, Output, at::Tensor>;

  /// @pre the module is registered completely: what it registers later is not seen.
  explicit ModuleBlock(std::shared_ptr<Held> module) : module_{std::move(module)} {
    expects(module_ != nullptr, "a module block has a module");
    for (const auto& parameter : module_->named_parameters())
      add(parameter.key(), parameter.value());
    for (const auto& buffer : module_->named_buffers()) add(buffer.key(), buffer.value());
    parts_ = module_->modules();
  }
  explicit ModuleBlock(const Module& holder) requires(!std::same_as<Module, Held>)
      : ModuleBlock{holder.ptr()} {}

  [[nodiscard]] std::vector<WeightSpec> weight_specs() const { return specs_of(tensors_); }
  [[nodiscard]] std::vector<NamedTensor> masters() const { return tensors_; }
  [[nodiscard]] const std::shared_ptr<Held>& module() const noexcept { return module_; }
  /// @brief Which parts of the module are in training.
  [[nodiscard]] std::uint64_t mode() const {
    std::uint64_t mode = 0;
    for (const auto& part : parts_) mode = 31 * mode + (part->is_training() ? 2 : 1);
    return mode;
  }

  void substitute(const Weights& weights) {
    expects(weights.size() == tensors_.size(), "a module block is lent one weight per tensor");
    expects(own_.empty(), "a module serves one visit at a time: two blocks must not share one");
    own_.reserve(tensors_.size());
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const at::Tensor& tensor = tensors_[i].tensor;
      own_.push_back({tensor.tensor_data(), tensor._version()});
      tensor.unsafeGetTensorImpl()->shallow_copy_from(weights[i].getIntrusivePtr());
      if (weights[i].requires_grad()) {  // uses of the tensor are uses of the weight
        torch::autograd::impl::set_gradient_edge(tensor,
                                                 torch::autograd::impl::gradient_edge(weights[i]));
      }
    }
  }
  void restore() noexcept {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      const at::Tensor& tensor = tensors_[i].tensor;
      tensor.unsafeGetTensorImpl()->shallow_copy_from(own_[i].data.getIntrusivePtr());
      if (tensor.grad_fn() != nullptr) torch::autograd::impl::set_gradient_edge(tensor, {});
    }
    own_.clear();
  }

  /// @pre substitute() was called, unless the weights are the module's own tensors.
  [[nodiscard]] at::Tensor forward(const Weights& weights, const at::Tensor& hidden,
                                   Context& context) {
    auto output = run(weights, hidden, context);
    if constexpr (detail::is_tuple<decltype(output)>) {
      return std::get<0>(std::move(output));
    } else {
      return output;
    }
  }
  [[nodiscard]] Result forward_whole(const Weights& weights, const at::Tensor& hidden,
                                     Context& context) requires detail::is_tensor_tuple<Output> {
    return run(weights, hidden, context);
  }

 private:
  struct Own {
    at::Tensor data;  ///< the tensor's own bytes and shape
    std::int64_t version = 0;
  };

  void add(const std::string& name, const at::Tensor& tensor) {
    for (const NamedTensor& known : tensors_) {
      if (known.tensor.is_same(tensor)) return;
    }
    tensors_.push_back({name, tensor});
  }
  Output run(const Weights& weights, const at::Tensor& hidden, Context& context) {
    if (module_->is_training() != weights.training()) module_->train(weights.training());
    Output output = detail::call_module(*module_, hidden, context);
    check_unwritten();
    return output;
  }
  void check_unwritten() const {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      if (tensors_[i].tensor._version() == own_[i].version) continue;
      throw ContractViolation{"a module changed its tensor " + tensors_[i].name +
                              " in place; what streams may only be read in a forward (running "
                              "statistics in training are not supported: eval() that module)"};
    }
  }

  std::shared_ptr<Held> module_;
  std::vector<std::shared_ptr<torch::nn::Module>> parts_;  ///< itself among them
  std::vector<NamedTensor> tensors_;                       ///< each once: parameters, then buffers
  std::vector<Own> own_;                                   ///< during a visit
};

/// @brief Takes the bytes of a module's tensors away; names, shapes and types stay. For modules
/// whose bytes come from files (@see stored_blocks): made one after another and stripped at once,
/// any number of them takes the memory of one.
inline void to_meta(torch::nn::Module& module) {
  const c10::InferenceMode normal_mode{false};
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor bare =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    tensor.unsafeGetTensorImpl()->shallow_copy_from(bare.getIntrusivePtr());
  }
}

template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> ModuleBlock(const Holder&)
->ModuleBlock<Holder>;
template <class Module>
ModuleBlock(std::shared_ptr<Module>) -> ModuleBlock<Module>;

}  // namespace block_streamer::inline v1
