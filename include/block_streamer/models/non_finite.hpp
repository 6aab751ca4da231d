// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/core/ids.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>

#include <optional>
#include <string>

namespace block_streamer::inline v1 {

/// A step's loss or a gradient is not finite: the run has diverged, or its weights or data are bad.
class NotFiniteError : public Error {
 public:
  using Error::Error;
};

/// @brief Where values stop being finite, found by a forward that looks at every block's output:
/// "the output of block 7", "the embedding", or "the logits" if every block's output is finite.
/// @param context  of a fresh pass over `ids`.
/// **Cost.** One evaluation forward with a host wait per block.
template <class Model, class Streamer, class Context>
[[nodiscard]] std::string first_non_finite(const Model& model, Streamer& streamer,
                                           const at::Tensor& ids, Context&& context) {
  const auto finite = [](const at::Tensor& t) {
    return at::isfinite(t).all().template item<bool>();
  };
  const at::Tensor embedded = model.embed(ids);
  if (!finite(embedded)) return "the embedding";
  std::optional<BlockId> first;
  (void)streamer.forward_observed(embedded, context, [&](BlockId block, const at::Tensor& output) {
    if (!first && !finite(output)) first = block;
  });
  return first ? "the output of " + to_string(PartId{*first}) : "the logits";
}

/// @copydoc first_non_finite
template <class Model, class Streamer>
[[nodiscard]] std::string first_non_finite(const Model& model, Streamer& streamer,
                                           const at::Tensor& ids) {
  return first_non_finite(model, streamer, ids, model.context(ids));
}

}  // namespace block_streamer::inline v1
