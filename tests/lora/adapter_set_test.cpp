// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/lora/adapter_set.hpp>

#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/lora/peft_loading.hpp>
#include <block_streamer/models/llama.hpp>
#include <block_streamer/models/resident_weights.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <string>
#include <vector>

#include <lora/tiny_llama.hpp>
#include <support/catch.hpp>
#include <support/waves.hpp>

namespace bs = block_streamer;
using support::largest;

namespace {

/// The fixtures' model with both of its adapters, "one" and "two".
struct Pair {
  Pair()
      : model{bs::Checkpoint::open(lora_fixture("base")), {.dtype = bs::DType::f32}},
        blocks{model.blocks()},
        weights{bs::models::resident_weights(model)},
        set{bs::lora_blocks_of<bs::models::LlamaBlock>(blocks, model.layout().blocks)},
        expected{bs::Checkpoint::open(lora_fixture("pair.safetensors"))},
        ids{bs::load_tensor(expected, "ids")} {
    const auto sites = bs::lora_blocks_of<bs::models::LlamaBlock>(blocks, model.layout().blocks);
    set.add("one", bs::load_adapter(lora_fixture("all_linear"), sites, at::kCPU));
    set.add("two", bs::load_adapter(lora_fixture("patterned"), sites, at::kCPU));
  }
  at::Tensor logits(const bs::AdapterTable& table) {
    bs::models::DecoderContext context = model.context(ids);
    return model.logits(bs::resident_forward(std::span{blocks},
                                             std::span<const std::vector<at::Tensor>>{weights},
                                             model.embed(ids), context, &table, true));
  }
  at::Tensor theirs(const std::string& name) const { return bs::load_tensor(expected, name); }

  bs::models::Llama model;
  std::vector<bs::models::LlamaBlock> blocks;
  std::vector<std::vector<at::Tensor>> weights;
  bs::AdapterSet set;
  bs::Checkpoint expected;
  at::Tensor ids;
};

}  // namespace

TEST_CASE("one of several adapters, their sum and a weighted sum have peft's logits") {
  Pair pair;
  const at::Tensor bare = pair.logits(pair.set.table());
  CHECK(largest(bare, pair.theirs("logits.none")) < 1e-4);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"one"}, "logits.one"}, {{"two"}, "logits.two"}, {{"one", "two"}, "logits.both"}};
  for (const auto& [names, key] : cases) {
    CAPTURE(key);
    pair.set.activate(names);
    CHECK(pair.set.active() == names);
    const at::Tensor got = pair.logits(pair.set.table());
    CHECK(largest(got, pair.theirs(key)) < 1e-4);
    CHECK(largest(got, bare) > 0.05);
  }
  pair.set.set_weight("one", 0.5);
  pair.set.set_weight("two", 1.5);
  CHECK(largest(pair.logits(pair.set.table()), pair.theirs("logits.weighted")) < 1e-4);
}

TEST_CASE("of active adapters the chosen one trains, with peft's gradients, and no other") {
  Pair pair;
  pair.set.activate({"one", "two"});
  const bs::AdapterTable table = pair.set.table("two");
  std::size_t trained = 0;
  for (const bs::BlockAdapters& block : table.blocks) trained += block.parameters.size();
  CHECK(trained == pair.set.at("two").parameters().size());
  const bs::TokenLoss loss = bs::token_loss(pair.logits(table), pair.ids, pair.ids.ge(0));
  loss.sum.div(static_cast<double>(loss.count)).backward();
  for (const auto& [name, tensor] : pair.set.at("two").named_parameters()) {
    CAPTURE(name);
    const at::Tensor theirs = pair.theirs("grad." + name);
    REQUIRE(tensor.grad().defined());
    CHECK(largest(tensor.grad(), theirs) < 1e-5 + 1e-4 * theirs.abs().max().item<double>());
  }
  for (const at::Tensor& tensor : pair.set.at("one").parameters()) {
    CHECK_FALSE(tensor.requires_grad());
    CHECK_FALSE(tensor.grad().defined());
  }
  // Afterwards the other one.
  const bs::AdapterTable other = pair.set.table("one");
  CHECK(pair.set.at("one").parameters()[0].requires_grad());
  CHECK_FALSE(pair.set.at("two").parameters()[0].requires_grad());
}

TEST_CASE("a sum is rounded to a half type once, whatever the number of its terms") {
  const at::Tensor a = at::full({1, 2}, 1.0F), b = at::full({1, 1}, 1.0F);
  // 256 + 1 is no bf16 number: terms that were rounded one by one would all be lost.
  std::vector<bs::LowRankTerm> terms(4, {a, b, 0.5, 0});
  const bs::SummedProjection sum{terms};
  const at::Tensor x = at::ones({1, 2}, at::kBFloat16);
  const at::Tensor got = sum.add(x, at::full({1, 1}, 256.0F).to(at::kBFloat16), false);
  CHECK(got.scalar_type() == at::kBFloat16);
  CHECK(got.item<float>() == 260.0F);
}

TEST_CASE("names of adapters that are unknown, known already or twice are refused with the name") {
  Pair pair;
  CHECK(pair.set.names() == std::vector<std::string>{"one", "two"});
  pair.set.activate({"two"});
  const bs::LoraAdapter adapter = pair.set.at("one");
  CHECK_THROWS_WITH(pair.set.add("one", adapter), ContainsSubstring("\"one\" already"));
  CHECK_THROWS_WITH(pair.set.activate({"three"}), ContainsSubstring("\"three\", but one, two"));
  CHECK_THROWS_WITH(pair.set.activate({"one", "one"}), ContainsSubstring("\"one\" is named twice"));
  CHECK(pair.set.active() == std::vector<std::string>{"two"});
  CHECK_THROWS_AS(pair.set.table("one"), bs::ContractViolation);  // not active
  CHECK_THROWS_AS(pair.set.set_weight("three", 1), bs::BindingError);
  CHECK_THROWS_AS(pair.set.add("x", bs::LoraAdapter{}), bs::ContractViolation);
}
