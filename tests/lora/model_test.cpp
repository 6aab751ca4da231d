// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/lora/peft_loading.hpp>
#include <block_streamer/models/llama.hpp>
#include <block_streamer/models/resident_weights.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/optim/gradient_norm.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <cstdlib>
#include <iostream>

#include <lora/tiny_llama.hpp>
#include <support/catch.hpp>
#include <support/waves.hpp>

namespace bs = block_streamer;
using support::largest;
namespace fs = std::filesystem;

namespace {

/// A frozen model with all its weights in memory and adapters woven in: no streamer anywhere.
struct ResidentModel {
  explicit ResidentModel(const fs::path& folder)
      : model{bs::Checkpoint::open(folder), {.dtype = bs::DType::f32}},
        blocks{model.blocks()},
        weights{bs::models::resident_weights(model)},
        sites{bs::lora_blocks_of<bs::models::LlamaBlock>(blocks, model.layout().blocks)} {}

  at::Tensor logits(const at::Tensor& ids, const bs::AdapterTable* adapters) {
    bs::models::DecoderContext context = model.context(ids);
    return model.logits(bs::resident_forward(std::span{blocks},
                                             std::span<const std::vector<at::Tensor>>{weights},
                                             model.embed(ids), context, adapters, true));
  }

  bs::models::Llama model;
  std::vector<bs::models::LlamaBlock> blocks;
  std::vector<std::vector<at::Tensor>> weights;
  std::vector<bs::LoraBlock> sites;
};

/// The real model's folder; empty, with a printed reason, if it is not there.
fs::path smollm2_folder() {
  const char* variable = std::getenv("BLOCK_STREAMER_SMOLLM2");
  const fs::path folder = variable != nullptr ? variable : BLOCK_STREAMER_SMOLLM2_FOLDER;
  if (fs::exists(folder / "model.safetensors")) return folder;
  std::cout << "skipped: no model.safetensors in " << folder.string()
            << " (set BLOCK_STREAMER_SMOLLM2)\n";
  return {};
}

/// The initial adapter that the fixture's script uses: a formula of place and index.
void fill_by_formula(const bs::LoraAdapter& adapter) {
  int index = 0;
  for (const at::Tensor& parameter : adapter.parameters()) {
    parameter.set_data(at::arange(parameter.numel(), at::kDouble)
                           .mul(0.37)
                           .add(index)
                           .sin()
                           .mul(index % 2 == 0 ? 0.05 : 0.02)
                           .to(at::kFloat)
                           .view(parameter.sizes()));
    ++index;
  }
}

}  // namespace

TEST_CASE("adapters of peft give peft's logits and gradients, and nothing else gets a gradient") {
  const std::string name = GENERATE(as<std::string>{}, "all_linear", "patterned");
  CAPTURE(name);
  ResidentModel base{lora_fixture("base")};
  const bs::LoraAdapter adapter = bs::load_adapter(lora_fixture(name), base.sites, at::kCPU);
  const bs::AdapterTable table = adapter.table(base.sites);
  const bs::Checkpoint expected = bs::Checkpoint::open(lora_fixture(name) / "expected.safetensors");
  const at::Tensor ids = bs::load_tensor(expected, "ids");
  const at::Tensor logits = base.logits(ids, &table);
  CHECK(largest(logits, bs::load_tensor(expected, "logits")) < 1e-4);
  CHECK(largest(base.logits(ids, nullptr), bs::load_tensor(expected, "logits")) > 0.1);
  const bs::TokenLoss loss = bs::token_loss(logits, ids, ids.ge(0));
  const at::Tensor mean = loss.sum.div(static_cast<double>(loss.count));
  CHECK(mean.item<double>() ==
        Approx(bs::load_tensor(expected, "loss").item<double>()).epsilon(1e-6));
  mean.backward();
  for (const auto& [parameter, tensor] : adapter.named_parameters()) {
    CAPTURE(parameter);
    const at::Tensor theirs = bs::load_tensor(expected, "grad." + parameter);
    CHECK(largest(tensor.grad(), theirs) < 1e-5 + 1e-4 * theirs.abs().max().item<double>());
  }
  for (const auto& block : base.weights) {
    for (const at::Tensor& weight : block) {
      CHECK_FALSE(weight.requires_grad());
      CHECK_FALSE(weight.grad().defined());
    }
  }
  CHECK_FALSE(base.model.embedding().grad().defined());
}

TEST_CASE("a new adapter leaves the model's logits bit for bit") {
  ResidentModel base{lora_fixture("base")};
  const bs::LoraAdapter adapter = bs::make_lora_adapter(base.sites, {.dropout = 0.5}, at::kCPU);
  const bs::AdapterTable table = adapter.table(base.sites);
  const at::Tensor ids = at::arange(26, at::kLong).view({2, 13});
  CHECK(at::equal(base.logits(ids, &table), base.logits(ids, nullptr)));
}

TEST_CASE("b88 every tensor of adapters on a frozen model trains from integer ids") {
  ResidentModel base{lora_fixture("base")};
  const bs::LoraAdapter adapter = bs::make_lora_adapter(
      base.sites,
      {.rank = 2,
       .targets = {"model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj",
                   "model.layers.3.mlp.down_proj"}},
      at::kCPU);
  const bs::AdapterTable table = adapter.table(base.sites);
  std::vector<at::Tensor> parameters = adapter.parameters();
  const at::Tensor ids = at::arange(26, at::kLong).view({2, 13});
  bs::AdamW optimizer;
  for (int step = 1; step <= 2; ++step) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor{};
    bs::token_loss(base.logits(ids, &table), ids, ids.ge(0)).sum.backward();
    if (step == 1) optimizer.step(parameters, {.learning_rate = 0.01});
  }
  for (const at::Tensor& parameter : parameters)
    CHECK(parameter.grad().abs().max().item<double>() > 1e-4);
}

TEST_CASE("ten AdamW steps of LoRA on SmolLM2 have peft's losses") {
  const fs::path folder = smollm2_folder();
  if (folder.empty()) return;
  ResidentModel base{folder};
  const bs::LoraAdapter adapter = bs::make_lora_adapter(
      base.sites,
      {.rank = 2, .alpha = 8, .targets = {"q_proj", "v_proj"}, .top_fraction = 4.0 / 30}, at::kCPU);
  fill_by_formula(adapter);
  const bs::AdapterTable table = adapter.table(base.sites);
  std::vector<at::Tensor> parameters = adapter.parameters();
  REQUIRE(parameters.size() == 16);
  const bs::Checkpoint expected = bs::Checkpoint::open(lora_fixture("smollm2.safetensors"));
  const at::Tensor ids = bs::load_tensor(expected, "ids").to(at::kLong);
  const at::Tensor trained = bs::load_tensor(expected, "trained").to(at::kBool);
  const at::Tensor losses = bs::load_tensor(expected, "losses");
  const at::Tensor norms = bs::load_tensor(expected, "norms");
  bs::AdamW optimizer{{.weight_decay = 0.1}};
  for (std::int64_t step = 0; step < ids.size(0); ++step) {
    CAPTURE(step);
    const at::Tensor logits = base.logits(ids[step], &table);
    const bs::TokenLoss loss = bs::token_loss(logits, ids[step], trained);
    const at::Tensor mean = loss.sum.div(static_cast<double>(loss.count));
    CHECK(std::abs(mean.item<double>() - losses[step].item<double>()) < 1e-4);
    mean.backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    CHECK(bs::global_gradient_norm(gradients) == Approx(norms[step].item<double>()).epsilon(1e-3));
    optimizer.step(parameters,
                   {.step = static_cast<std::uint64_t>(step) + 1, .learning_rate = 2e-3});
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor{};
  }
}

// Run by check_peft_loads_ours.py, which compares what is written here with peft.
TEST_CASE("export of adapters for peft to load", "[.export]") {
  const char* target = std::getenv("BLOCK_STREAMER_EXPORT");
  REQUIRE(target != nullptr);
  ResidentModel base{lora_fixture("base")};
  const at::Tensor ids = at::arange(34, at::kLong).mul(7).remainder(61).view({2, 17});
  const auto write = [&](const std::string& name, const bs::LoraAdapter& adapter) {
    const fs::path folder = fs::path{target} / name;
    bs::save_adapter(folder, adapter, "base");
    const bs::AdapterTable table = adapter.table(base.sites);
    const at::Tensor logits = base.logits(ids, &table).detach().contiguous();
    const std::vector<bs::TensorBytes> tensors{
        {{"ids", bs::DType::i64, bs::shape_of(ids)}, bs::bytes_of(ids)},
        {{"logits", bs::DType::f32, bs::shape_of(logits)}, bs::bytes_of(logits)}};
    bs::write_safetensors(folder / "logits.safetensors", tensors);
  };
  const auto filled = [&](const bs::LoraOptions& options) {
    bs::LoraAdapter adapter = bs::make_lora_adapter(base.sites, options, at::kCPU);
    for (const at::Tensor& p : adapter.parameters())
      p.set_data(p.detach().add(at::arange(p.numel(), at::kFloat).sin().mul(0.2).view(p.sizes())));
    return adapter;
  };
  write("all", filled({.rank = 3, .alpha = 7.5, .dropout = 0.0}));
  write("top_half", filled({.rank = 5, .top_fraction = 0.5, .use_rslora = true}));
  write("named", filled({.rank = 2, .targets = {"o_proj", "model.layers.1.mlp.up_proj"}}));
  write("own_patterns",
        filled({.rank = 4,
                .targets = {"all-linear"},
                .use_rslora = true,
                .rank_pattern = {{"layers[.]1[.]self_attn[.]q_proj", 2}, {"q_proj", 6}},
                .alpha_pattern = {{"mlp[.].*", 9}, {"layers[.]0[.].*", 5.5}}}));
  write("regex", filled({.rank = 3, .target_pattern = ".*[.](0[.]mlp[.]|1[.]self_attn[.]v).*"}));
  write("patterned", bs::load_adapter(lora_fixture("patterned"), base.sites, at::kCPU));
}
