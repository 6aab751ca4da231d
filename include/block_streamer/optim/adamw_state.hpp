// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/optim/adamw.hpp>

#include <ATen/ops/scalar_tensor.h>

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One block's state as named tensors: "<name>.exp_avg" and ".exp_avg_sq" (fp32, shared with
/// the optimizer, not copied) and "<name>.step" (int64 scalar). A parameter that never had a
/// gradient has no entry.
/// @param names  one per parameter, in the order of update().
[[nodiscard]] inline NamedTensors adamw_state(const AdamW& optimizer,
                                              std::span<const std::string> names,
                                              BlockId block = {}) {
  const auto moments = optimizer.moments(block);
  expects(moments.empty() || moments.size() == names.size(), "AdamW: one name per parameter");
  NamedTensors saved;
  for (std::size_t i = 0; i < moments.size(); ++i) {
    if (moments[i].step == 0) continue;
    saved.push_back({names[i] + ".exp_avg", moments[i].exp_avg});
    saved.push_back({names[i] + ".exp_avg_sq", moments[i].exp_avg_sq});
    saved.push_back({names[i] + ".step",
                     at::scalar_tensor(static_cast<std::int64_t>(moments[i].step), at::kLong)});
  }
  return saved;
}

namespace detail {
/// The entry `name`, taken out of `unused`; nullptr if there is none.
[[nodiscard]] inline const at::Tensor* take_state(const NamedTensors& saved,
                                                  const std::string& name,
                                                  std::set<std::string>& unused) {
  for (const auto& [key, tensor] : saved) {
    if (key != name) continue;
    unused.erase(key);
    return &tensor;
  }
  return nullptr;
}

[[nodiscard]] inline at::Tensor checked_moment(const at::Tensor* saved, const std::string& name,
                                               const at::Tensor& parameter) {
  if (saved == nullptr) throw BindingError{"optimizer state: " + name + " is missing"};
  if (saved->scalar_type() != at::kFloat)
    throw BindingError{"optimizer state: " + name + " must be F32, it is " +
                       std::string{c10::toString(saved->scalar_type())}};
  if (saved->sizes() != parameter.sizes())
    throw BindingError{"optimizer state: " + name + " has another shape than its parameter"};
  const c10::InferenceMode normal{false};
  return saved->to(parameter.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}
}  // namespace detail

/// @brief Takes up what adamw_state() gave; the next update continues the run bit for bit.
/// @param parameters  what `names` stand for: shapes and device. Saved tensors are copied.
/// @throws BindingError naming the entry that is missing, unknown, or of another shape or dtype
/// (nothing is cast); the optimizer is unchanged then.
inline void load_adamw_state(AdamW& optimizer, std::span<const std::string> names,
                             std::span<const at::Tensor> parameters, const NamedTensors& saved,
                             BlockId block = {}) {
  expects(names.size() == parameters.size(), "AdamW: one name per parameter");
  std::set<std::string> unused;
  for (const auto& [name, tensor] : saved) unused.insert(name);
  std::vector<AdamW::Moments> moments(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    const at::Tensor* m = detail::take_state(saved, names[i] + ".exp_avg", unused);
    const at::Tensor* v = detail::take_state(saved, names[i] + ".exp_avg_sq", unused);
    const at::Tensor* step = detail::take_state(saved, names[i] + ".step", unused);
    if (m == nullptr && v == nullptr && step == nullptr) continue;
    moments[i].exp_avg = detail::checked_moment(m, names[i] + ".exp_avg", parameters[i]);
    moments[i].exp_avg_sq = detail::checked_moment(v, names[i] + ".exp_avg_sq", parameters[i]);
    if (step == nullptr || step->scalar_type() != at::kLong || step->numel() != 1 ||
        step->item<std::int64_t>() < 1)
      throw BindingError{"optimizer state: " + names[i] + ".step must be one positive I64"};
    moments[i].step = static_cast<std::uint64_t>(step->item<std::int64_t>());
  }
  if (!unused.empty())
    throw BindingError{"optimizer state: " + *unused.begin() + " belongs to no parameter"};
  optimizer.set_moments(std::move(moments), block);
}

}  // namespace block_streamer::inline v1
