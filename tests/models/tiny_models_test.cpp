// SPDX-License-Identifier: Apache-2.0
#include "resident_model.hpp"

#include <block_streamer/block/adapter_table.hpp>
#include <block_streamer/models/llama.hpp>
#include <block_streamer/models/qwen3.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <memory>
#include <string>
#include <vector>

#include <support/catch.hpp>

using namespace block_streamer_test;
namespace models = bs::models;

namespace {

const std::vector<std::string> all_models{"qwen3_tied", "qwen3_sharded", "llama_gqa",
                                          "llama_scaled"};

/// Ids that differ everywhere.
at::Tensor some_ids(std::int64_t rows, std::int64_t tokens) {
  const at::Tensor i = at::arange(rows * tokens);
  return ((i * i * 7 + i * 13 + 5) % 89).view({rows, tokens});
}

std::string message_of(const auto& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("logits, loss and gradients equal those of transformers") {
  for (const std::string& name : all_models) {
    INFO(name);
    ResidentModel tiny{fixture(name)};
    const auto expected = bs::Checkpoint::open(fixture(name) / "expected");
    const auto load = [&](const std::string& key) { return bs::load_tensor(expected, key); };
    for (auto& block : tiny.weights) {
      for (at::Tensor& weight : block) weight.requires_grad_();
    }
    const at::Tensor ids = load("ids");
    const at::Tensor embedded = tiny.model.embed(ids).detach().requires_grad_();
    models::DecoderContext context = tiny.model.context(ids);
    const at::Tensor logits = tiny.model.logits(tiny.hidden(embedded, context));
    CHECK(largest_difference(logits, load("logits")) < 3e-5);

    const std::int64_t last = ids.size(1) - 1;
    const at::Tensor loss = at::cross_entropy_loss(logits.narrow(1, 0, last).flatten(0, 1),
                                                   ids.narrow(1, 1, last).flatten());
    CHECK(loss.item<double>() == Approx(load("loss").item<double>()).epsilon(1e-5));
    loss.backward();
    CHECK(largest_difference(embedded.grad(), load("grad.hidden")) < 2e-5);
    for (std::size_t layer = 0; layer < tiny.blocks.size(); ++layer) {
      const auto specs = tiny.blocks[layer].weight_specs();
      for (std::size_t i = 0; i < specs.size(); ++i) {
        const std::string key = std::to_string(layer) + "." + specs[i].name;
        INFO(key);
        const at::Tensor grad = tiny.weights[layer][i].grad();
        const at::Tensor rows = load("grad." + key);
        CHECK(largest_difference(grad.narrow(0, 0, rows.size(0)), rows) < 2e-5);
        // The key's bias adds the same to all scores of a query: its gradient is rounding alone.
        const double norm = load("norm." + key).item<double>();
        CHECK(grad.norm().item<double>() == Approx(norm).epsilon(1e-3).margin(1e-5));
      }
    }
  }
}

TEST_CASE("b139_decoding_token_by_token_to_the_last_slot_of_the_cache_equals_one_forward") {
  const c10::NoGradGuard no_grad;
  for (const std::string& name : all_models) {
    INFO(name);
    ResidentModel tiny{fixture(name)};
    const at::Tensor ids = some_ids(2, 21);
    const at::Tensor whole = tiny.logits(ids);
    bs::KvCache cache = tiny.model.make_cache(2, 21);
    std::vector<at::Tensor> steps;
    for (std::int64_t i = 0; i < 21; ++i) {
      steps.push_back(tiny.logits(ids.narrow(1, i, 1), {.cache = &cache}));
      CHECK(cache.length() == i + 1);
    }
    CHECK(largest_difference(at::cat(steps, 1), whole) < 2e-5);
    CHECK_THROWS_AS(tiny.logits(ids.narrow(1, 0, 1), {.cache = &cache}), bs::ContractViolation);
  }
}

TEST_CASE("b140_prefill_in_chunks_equals_one_prefill_in_passes_and_inside_one") {
  const c10::NoGradGuard no_grad;
  for (const std::string& name : all_models) {
    ResidentModel tiny{fixture(name)};
    const at::Tensor ids = some_ids(2, 23);
    const at::Tensor whole = tiny.logits(ids);
    for (const std::int64_t step : {1, 5, 22, 23, 100}) {
      INFO(name << ", " << step << " at a time");
      bs::KvCache cache = tiny.model.make_cache(2, 30);
      std::vector<at::Tensor> passes;
      for (std::int64_t begin = 0; begin < 23; begin += step) {
        const std::int64_t count = std::min<std::int64_t>(step, 23 - begin);
        passes.push_back(tiny.logits(ids.narrow(1, begin, count), {.cache = &cache}));
      }
      CHECK(largest_difference(at::cat(passes, 1), whole) < 2e-5);

      bs::KvCache inside = tiny.model.make_cache(2, 30);
      tiny.logits(ids.narrow(1, 0, 4), {.cache = &inside});
      const at::Tensor rest =
          tiny.logits(ids.narrow(1, 4, 19), {.cache = &inside, .chunk_tokens = step});
      CHECK(largest_difference(rest, whole.narrow(1, 4, 19)) < 2e-5);
    }
  }
}

TEST_CASE("b140_a_left_padded_batch_equals_single_runs_in_prefill_chunks_and_decode") {
  const c10::NoGradGuard no_grad;
  for (const std::string& name : all_models) {
    for (const std::int64_t chunk : {1, 3, 100}) {
      INFO(name << ", chunks of " << chunk);
      ResidentModel tiny{fixture(name)};
      const std::vector<std::int64_t> lengths{3, 9, 1, 6};
      const std::int64_t longest = 9;
      const std::int64_t more = 4;
      std::vector<std::int64_t> padding;
      std::vector<at::Tensor> rows;
      for (std::size_t b = 0; b < lengths.size(); ++b) {
        padding.push_back(longest - lengths[b]);
        const at::Tensor real = some_ids(4, longest + more)[static_cast<std::int64_t>(b)].narrow(
            0, 0, lengths[b] + more);
        rows.push_back(at::cat({at::full({padding[b]}, 2, at::kLong), real}));
      }
      const at::Tensor ids = at::stack(rows);  // (B, longest + more)
      bs::KvCache cache = tiny.model.make_cache(4, longest + more);
      std::vector<at::Tensor> parts{
          tiny.logits(ids.narrow(1, 0, longest),
                      {.cache = &cache, .left_padding = padding, .chunk_tokens = chunk})};
      for (std::int64_t i = longest; i < longest + more; ++i) {
        parts.push_back(
            tiny.logits(ids.narrow(1, i, 1), {.cache = &cache, .left_padding = padding}));
      }
      const at::Tensor batched = at::cat(parts, 1);  // (B, longest + more, V)
      CHECK(at::isfinite(batched).all().item<bool>());
      for (std::int64_t b = 0; b < 4; ++b) {
        const std::int64_t pad = padding[static_cast<std::size_t>(b)];
        const std::int64_t count = longest + more - pad;
        const at::Tensor alone = tiny.logits(ids.narrow(0, b, 1).narrow(1, pad, count));
        CHECK(largest_difference(batched.narrow(0, b, 1).narrow(1, pad, count), alone) < 2e-5);
      }
    }
  }
}

TEST_CASE("a padded batch needs no cache, and padding at the right changes nothing") {
  const c10::NoGradGuard no_grad;
  ResidentModel tiny{fixture("qwen3_tied")};
  const at::Tensor ids = some_ids(1, 7);
  const at::Tensor alone = tiny.logits(ids);
  const at::Tensor pad = at::zeros({1, 3}, at::kLong);
  const at::Tensor right = tiny.logits(at::cat({ids, pad}, 1));
  CHECK(largest_difference(right.narrow(1, 0, 7), alone) < 2e-5);
  const std::vector<std::int64_t> padding{3};
  const at::Tensor left = tiny.logits(at::cat({pad, ids}, 1), {.left_padding = padding});
  CHECK(largest_difference(left.narrow(1, 3, 7), alone) < 2e-5);
  CHECK(at::isfinite(left).all().item<bool>());
}

TEST_CASE("every row of a padded mask sees something, so no kernel can make it NaN") {
  const models::Qwen3 model{bs::Checkpoint::open(fixture("qwen3_tied"))};
  const std::vector<std::int64_t> padding{3, 0, 6};
  const models::DecoderContext context = model.context(3, 7, {.left_padding = padding});
  const at::Tensor& mask = context.chunks.at(0).attention.mask;  // (B,1,T,S)
  CHECK(mask.sizes() == at::IntArrayRef{3, 1, 7, 7});
  CHECK(mask.any(-1).all().item<bool>());
  CHECK_FALSE(mask[0][0][6][2].item<bool>());
  CHECK(mask[0][0][6][3].item<bool>());
}

TEST_CASE("a pass that failed halfway is repeated over the same cache") {
  const c10::NoGradGuard no_grad;
  ResidentModel tiny{fixture("llama_gqa")};
  const at::Tensor ids = some_ids(1, 9);
  const at::Tensor whole = tiny.logits(ids);
  bs::KvCache cache = tiny.model.make_cache(1, 9);
  tiny.logits(ids.narrow(1, 0, 4), {.cache = &cache});
  models::DecoderContext broken = tiny.model.context(1, 5, {.cache = &cache});
  (void)tiny.blocks[0].forward(bs::Weights{tiny.weights[0]},
                               tiny.model.embed(some_ids(1, 20).narrow(1, 15, 5)), broken);
  CHECK(cache.length() == 4);
  const at::Tensor rest = tiny.logits(ids.narrow(1, 4, 5), {.cache = &cache});
  CHECK(largest_difference(rest, whole.narrow(1, 4, 5)) < 2e-5);
}

TEST_CASE("the cache works in inference mode and logits_last is the last row of logits") {
  const c10::InferenceMode inference;
  ResidentModel tiny{fixture("llama_scaled")};
  const at::Tensor ids = some_ids(3, 6);
  bs::KvCache cache = tiny.model.make_cache(3, 6);
  const at::Tensor hidden = tiny.hidden(ids, {.cache = &cache});
  CHECK(largest_difference(tiny.model.logits_last(hidden), tiny.model.logits(hidden).select(1, 5)) <
        1e-6);
  CHECK_FALSE(tiny.model.embedding().is_inference());
}

namespace {
/// Counts its uses and leaves the output as it is.
class Counting final : public bs::ProjectionAdapter {
 public:
  explicit Counting(int& uses) : uses_{uses} {}
  [[nodiscard]] at::Tensor add(const at::Tensor& input, at::Tensor output, bool) const override {
    CHECK(input.dim() == 2);
    ++uses_;
    return output;
  }

 private:
  int& uses_;
};
}  // namespace

TEST_CASE("all seven linear maps of a block go through the seam for adapters") {
  const c10::NoGradGuard no_grad;
  for (const std::string& name : all_models) {
    ResidentModel tiny{fixture(name)};
    bs::AdapterTable table;
    std::vector<int> uses(64, 0);
    int projections = 0;
    for (const auto& block : tiny.blocks) {
      auto& adapters = table.blocks.emplace_back().by_weight;
      for (const bs::WeightSpec& spec : block.weight_specs()) {
        CHECK(spec.projection == spec.name.ends_with("_proj.weight"));
        adapters.push_back(spec.projection ? std::make_unique<Counting>(
                                                 uses[static_cast<std::size_t>(projections++)])
                                           : nullptr);
      }
    }
    CHECK(projections == 7 * static_cast<int>(tiny.blocks.size()));
    const at::Tensor ids = some_ids(1, 4);
    models::DecoderContext context = tiny.model.context(ids);
    (void)bs::resident_forward(std::span{tiny.blocks},
                               std::span<const std::vector<at::Tensor>>{tiny.weights},
                               tiny.model.embed(ids), context, &table);
    for (int i = 0; i < projections; ++i) CHECK(uses[static_cast<std::size_t>(i)] == 1);
  }
}

TEST_CASE("a tied head is the embedding, an untied one is its own tensor") {
  ResidentModel tied{fixture("qwen3_tied")};
  CHECK(tied.model.head().is_same(tied.model.embedding()));
  ResidentModel own{fixture("qwen3_sharded")};
  CHECK_FALSE(at::equal(own.model.head(), own.model.embedding()));
}

TEST_CASE("the type of the embedding is the model's unless another is asked for") {
  const models::Llama stored{bs::Checkpoint::open(fixture("llama_gqa"))};
  CHECK(stored.dtype() == bs::DType::bf16);
  CHECK(stored.embed(some_ids(1, 3)).scalar_type() == at::kBFloat16);
  const models::Llama half{bs::Checkpoint::open(fixture("llama_gqa")), {bs::DType::f16}};
  CHECK(half.embed(some_ids(1, 3)).scalar_type() == at::kHalf);
  CHECK_THROWS_AS((models::Llama{bs::Checkpoint::open(fixture("llama_gqa")), {bs::DType::i32}}),
                  bs::ContractViolation);
}

TEST_CASE("wrong families, ids and lengths are refused by name") {
  const auto wrong = [] { models::Llama{bs::Checkpoint::open(fixture("qwen3_tied"))}; };
  CHECK_THROWS_AS(wrong(), bs::UnsupportedError);
  CHECK(has(message_of(wrong), "model_type is qwen3"));

  const models::Qwen3 model{bs::Checkpoint::open(fixture("qwen3_tied"))};
  const auto beyond = [&] { (void)model.embed(at::full({1, 2}, 97, at::kLong)); };
  CHECK_THROWS_AS(beyond(), bs::Error);
  CHECK(has(message_of(beyond), "token id 97 is outside the model's vocabulary of 97"));
  CHECK_THROWS_AS(model.embed(at::full({1, 2}, -1, at::kLong)), bs::Error);
  CHECK_NOTHROW(model.context(1, 96));
  const auto longer = [&] { (void)model.context(1, 97); };
  CHECK_THROWS_AS(longer(), bs::Error);
  CHECK(has(message_of(longer), "97 tokens is longer than the model's 96 positions"));

  bs::KvCache cache = model.make_cache(2, 8);
  CHECK_THROWS_AS(model.context(1, 4, {.cache = &cache}), bs::ContractViolation);
  CHECK_THROWS_AS(model.context(2, 9, {.cache = &cache}), bs::ContractViolation);
  CHECK_THROWS_AS(model.context(2, 4, {.chunk_tokens = 2}), bs::ContractViolation);
  const std::vector<std::int64_t> padding{1};
  CHECK_THROWS_AS(model.context(2, 4, {.left_padding = padding}), bs::ContractViolation);
}

TEST_CASE("a tensor cut off by the end of its file is reported with file, offset and tensor") {
  const auto folder = std::filesystem::temp_directory_path() / "block_streamer_models_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto path = folder / "model.safetensors";
  std::filesystem::copy_file(fixture("qwen3_tied") / "model.safetensors", path);
  const auto checkpoint = bs::Checkpoint::open(path);
  const auto& stored = checkpoint.at("model.norm.weight");
  std::filesystem::resize_file(path, stored.range.offset + 4);
  const auto load = [&] { (void)bs::load_tensor(checkpoint, "model.norm.weight"); };
  CHECK_THROWS_AS(load(), bs::StorageError);
  CHECK(has(message_of(load), "offset " + std::to_string(stored.range.offset)));
  CHECK(has(message_of(load), "model.norm.weight"));
  CHECK(has(message_of(load), path.string()));
  std::filesystem::remove_all(folder);
}
