// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/named_tensor.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/optim/adamw.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/InferenceMode.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
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

[[nodiscard]] inline at::Tensor checked_moment(const at::Tensor& saved, const std::string& name,
                                               const at::Tensor& parameter) {
  if (!saved.defined()) throw BindingError{"optimizer state: " + name + " is missing"};
  if (saved.scalar_type() != at::kFloat)
    throw BindingError{"optimizer state: " + name + " must be F32, it is " +
                       std::string{c10::toString(saved.scalar_type())}};
  if (saved.sizes() != parameter.sizes())
    throw BindingError{"optimizer state: " + name + " has another shape than its parameter"};
  const c10::InferenceMode normal{false};
  return saved.to(parameter.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}
}  // namespace detail

/// @brief Takes up what adamw_state() gave, entry by entry; the next update continues the run bit
/// for bit.
/// @param parameters  what `names` stand for: shapes and device.
/// @param entries  the names of what was saved. @param read  one of them, called once for each; it
/// is copied.
/// @throws BindingError naming the entry that is missing, unknown, or of another shape or dtype
/// (nothing is cast); the optimizer is unchanged then.
inline void load_adamw_state(AdamW& optimizer, std::span<const std::string> names,
                             std::span<const at::Tensor> parameters, std::set<std::string> entries,
                             const std::function<at::Tensor(const std::string&)>& read,
                             BlockId block = {}) {
  expects(names.size() == parameters.size(), "AdamW: one name per parameter");
  const auto take = [&](const std::string& name) {
    return entries.erase(name) == 0 ? at::Tensor{} : read(name);
  };
  std::vector<AdamW::Moments> moments(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    at::Tensor m = take(names[i] + ".exp_avg");
    if (m.defined()) m = detail::checked_moment(m, names[i] + ".exp_avg", parameters[i]);
    const at::Tensor v = take(names[i] + ".exp_avg_sq"), step = take(names[i] + ".step");
    if (!m.defined() && !v.defined() && !step.defined()) continue;
    moments[i].exp_avg_sq = detail::checked_moment(v, names[i] + ".exp_avg_sq", parameters[i]);
    if (!m.defined()) throw BindingError{"optimizer state: " + names[i] + ".exp_avg is missing"};
    moments[i].exp_avg = std::move(m);
    if (!step.defined() || step.scalar_type() != at::kLong || step.numel() != 1 ||
        step.item<std::int64_t>() < 1)
      throw BindingError{"optimizer state: " + names[i] + ".step must be one positive I64"};
    moments[i].step = static_cast<std::uint64_t>(step.item<std::int64_t>());
  }
  if (!entries.empty())
    throw BindingError{"optimizer state: " + *entries.begin() + " belongs to no parameter"};
  optimizer.set_moments(std::move(moments), block);
}

/// @copydoc load_adamw_state
/// @param saved  all of it in memory.
inline void load_adamw_state(AdamW& optimizer, std::span<const std::string> names,
                             std::span<const at::Tensor> parameters, const NamedTensors& saved,
                             BlockId block = {}) {
  std::map<std::string, at::Tensor> by_name;
  std::set<std::string> entries;
  for (const auto& [name, tensor] : saved) {
    by_name.emplace(name, tensor);
    entries.insert(name);
  }
  load_adamw_state(
      optimizer, names, parameters, std::move(entries),
      [&](const std::string& name) { return by_name.at(name); }, block);
}

}  // namespace block_streamer::inline v1
