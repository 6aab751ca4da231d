// SPDX-License-Identifier: Apache-2.0
#include "resident_model.hpp"

#include <block_streamer/models/llama.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <cstdlib>
#include <iostream>
#include <vector>

#include <support/catch.hpp>

using namespace block_streamer_test;

namespace {

/// The real model's folder; empty, with a printed reason, if it is not there.
std::filesystem::path smollm2_folder() {
  const char* variable = std::getenv("BLOCK_STREAMER_SMOLLM2");
  const std::filesystem::path folder =
      variable != nullptr ? variable : BLOCK_STREAMER_SMOLLM2_FOLDER;
  if (std::filesystem::exists(folder / "model.safetensors")) return folder;
  std::cout << "skipped: no model.safetensors in " << folder.string()
            << " (set BLOCK_STREAMER_SMOLLM2)\n";
  return {};
}

at::Tensor expected(const std::string& name) {
  return bs::load_tensor(bs::Checkpoint::open(fixture("smollm2.safetensors")), name);
}

/// The next `count` tokens by the largest logit, `ids` prefilled in one pass.
at::Tensor greedy(ResidentModel& model, const at::Tensor& ids, std::int64_t count) {
  bs::KvCache cache = model.model.make_cache(1, ids.size(0) + count);
  std::vector<at::Tensor> found;
  at::Tensor step = ids.unsqueeze(0);
  for (std::int64_t i = 0; i < count; ++i) {
    const at::Tensor hidden = model.hidden(step, {.cache = &cache});
    step = model.model.logits_last(hidden).argmax(-1, /*keepdim=*/true);
    found.push_back(step.view({1}));
  }
  return at::cat(found);
}

double text_difference(ResidentModel& model) {
  const at::Tensor logits = model.logits(expected("text").unsqueeze(0))[0];
  return largest_difference(logits.gather(1, expected("chosen").to(at::kLong)), expected("logits"));
}

}  // namespace

TEST_CASE("SmolLM2 in float32 gives the greedy tokens and logits of transformers") {
  const auto folder = smollm2_folder();
  if (folder.empty()) return;
  const c10::InferenceMode inference;
  ResidentModel model{folder};
  CHECK(text_difference(model) < 2e-4);
  for (int i = 0; i < 5; ++i) {
    INFO("prompt " << i);
    const at::Tensor tokens = greedy(model, expected("prompt." + std::to_string(i)), 64);
    CHECK(at::equal(tokens, expected("greedy." + std::to_string(i))));
  }
}

TEST_CASE("SmolLM2 decodes a left-padded batch to the tokens of the single runs") {
  const auto folder = smollm2_folder();
  if (folder.empty()) return;
  const c10::InferenceMode inference;
  ResidentModel model{folder};
  std::vector<at::Tensor> rows;
  std::vector<std::int64_t> padding;
  for (int i = 0; i < 5; ++i) {
    const at::Tensor prompt = expected("prompt." + std::to_string(i));
    padding.push_back(14 - prompt.size(0));
    rows.push_back(at::cat({at::full({padding.back()}, 2, at::kLong), prompt}).unsqueeze(0));
  }
  bs::KvCache cache = model.model.make_cache(5, 14 + 16);
  at::Tensor step = at::cat(rows);
  std::vector<at::Tensor> found;
  for (int i = 0; i < 16; ++i) {
    const at::Tensor hidden = model.hidden(step, {.cache = &cache, .left_padding = padding});
    step = model.model.logits_last(hidden).argmax(-1, /*keepdim=*/true);
    found.push_back(step);
  }
  const at::Tensor tokens = at::cat(found, 1);  // (5,16)
  for (int i = 0; i < 5; ++i) {
    CHECK(at::equal(tokens[i], expected("greedy." + std::to_string(i)).narrow(0, 0, 16)));
  }
}

TEST_CASE("SmolLM2 in bfloat16 stays as close to float32 as transformers does") {
  const auto folder = smollm2_folder();
  if (folder.empty()) return;
  const c10::InferenceMode inference;
  ResidentModel model{folder, bs::DType::bf16};
  const double allowed = 1.5 * expected("bf16_max_difference").item<double>();
  const double found = text_difference(model);
  INFO("largest difference " << found << ", allowed " << allowed);
  CHECK(found <= allowed);
  CHECK(found > 0);
}
