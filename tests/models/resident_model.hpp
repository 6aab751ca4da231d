// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/models/resident_weights.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace block_streamer_test {

namespace bs = block_streamer;

inline std::filesystem::path fixture(const std::string& name) {
  return std::filesystem::path{BLOCK_STREAMER_TEST_FIXTURES} / "models" / name;
}

/// A model run fully resident: no streamer, plan or slot.
struct ResidentModel {
  explicit ResidentModel(const std::filesystem::path& folder, bs::DType dtype = bs::DType::f32)
      : model{bs::Checkpoint::open(folder), {dtype}},
        blocks{model.blocks()},
        weights{bs::models::resident_weights(model)} {}

  at::Tensor hidden(const at::Tensor& embedded, bs::models::DecoderContext& context) {
    return bs::resident_forward(
        std::span{blocks}, std::span<const std::vector<at::Tensor>>{weights}, embedded, context);
  }
  at::Tensor hidden(const at::Tensor& ids, const bs::models::ContextOptions& options = {}) {
    bs::models::DecoderContext context = model.context(ids, options);
    return hidden(model.embed(ids), context);
  }
  at::Tensor logits(const at::Tensor& ids, const bs::models::ContextOptions& options = {}) {
    return model.logits(hidden(ids, options));
  }

  bs::models::DecoderModel model;
  std::vector<bs::models::DecoderBlock> blocks;
  std::vector<std::vector<at::Tensor>> weights;
};

/// The largest absolute difference; infinite if there is a NaN.
inline double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor difference = (a.to(at::kDouble) - b.to(at::kDouble)).abs();
  return difference.nan_to_num(1e300).max().item<double>();
}

}  // namespace block_streamer_test
