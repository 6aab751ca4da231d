// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/lora/peft_loading.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <support/catch.hpp>
#include <support/safetensors_files.hpp>

namespace bs = block_streamer;

namespace {

std::vector<bs::LoraBlock> three_layers() {
  std::vector<bs::LoraBlock> list;
  for (int layer = 0; layer < 3; ++layer) {
    list.push_back({"model.layers." + std::to_string(layer),
                    {{"self_attn.q_proj.weight", {12, 8}, true},
                     {"mlp.up_proj.weight", {20, 8}, true},
                     {"norm.weight", {8}, false}}});
  }
  return list;
}

/// Rank and alpha by module.
std::map<std::string, std::pair<std::uint64_t, double>> form_of(const bs::LoraAdapter& adapter) {
  std::map<std::string, std::pair<std::uint64_t, double>> form;
  for (const auto& module : adapter.modules()) {
    CHECK(module.a.size(0) == static_cast<std::int64_t>(module.rank));
    CHECK(module.b.size(1) == static_cast<std::int64_t>(module.rank));
    form[module.site.module] = {module.rank, module.alpha};
  }
  return form;
}

}  // namespace

TEST_CASE("a target pattern names the modules whose whole name it matches") {
  const auto blocks = three_layers();
  const auto made = [&](const std::string& pattern) {
    return form_of(bs::make_lora_adapter(
        blocks, {.rank = 2, .target_pattern = pattern, .top_fraction = 1}, at::kCPU));
  };
  CHECK(made(".*[.][02][.]mlp[.].*").size() == 2);
  CHECK(made(".*[.][02][.]mlp[.].*").count("model.layers.2.mlp.up_proj") == 1);
  CHECK(made(".*q_proj|.*up_proj").size() == 6);
  CHECK_THROWS_WITH(made("q_proj"), ContainsSubstring("whole name"));
  CHECK_THROWS_WITH(made("(a"), ContainsSubstring("regular expression"));
}

TEST_CASE("the first pattern that matches a module's end gives its rank and its alpha") {
  const auto blocks = three_layers();
  const auto form = form_of(bs::make_lora_adapter(
      blocks,
      {.rank = 4,
       .alpha = 8,
       .rank_pattern = {{"layers[.]1[.]self_attn[.]q_proj", 2}, {"q_proj", 6}},
       .alpha_pattern = {{"up_proj", 3}, {"layers[.]1[.].*", 5}}},
      at::kCPU));
  CHECK(form.at("model.layers.0.self_attn.q_proj") == std::pair<std::uint64_t, double>{6, 8});
  CHECK(form.at("model.layers.1.self_attn.q_proj") == std::pair<std::uint64_t, double>{2, 5});
  CHECK(form.at("model.layers.1.mlp.up_proj") == std::pair<std::uint64_t, double>{4, 3});
  CHECK(form.at("model.layers.2.mlp.up_proj") == std::pair<std::uint64_t, double>{4, 3});
}

TEST_CASE("ranks, alphas and scales of single modules survive the files") {
  const support::TempFolder folder;
  const auto blocks = three_layers();
  const bs::LoraAdapter made =
      bs::make_lora_adapter(blocks,
                            {.rank = 4,
                             .alpha = 8,
                             .target_pattern = ".*[.](0[.].*|1[.]mlp[.].*)",
                             .use_rslora = true,
                             .rank_pattern = {{"q_proj", 6}},
                             .alpha_pattern = {{"layers[.]1[.].*", 5}}},
                            at::kCPU);
  bs::save_adapter(folder.path(), made);
  const bs::LoraAdapter loaded = bs::load_adapter(folder.path(), blocks, at::kCPU);
  CHECK(form_of(loaded) == form_of(made));
  CHECK(form_of(made).size() == 3);
  CHECK(loaded.options().use_rslora);
  const auto table = loaded.table(blocks);
  const auto* projection =
      dynamic_cast<const bs::LoraProjection*>(table.blocks[1].by_weight[1].get());
  REQUIRE(projection != nullptr);
  CHECK(projection->scale() == 5.0 / 2);  // alpha / sqrt(rank)
}

TEST_CASE("a pattern that matches nothing, and a rank above a map's size, are refused by name") {
  const auto blocks = three_layers();
  const auto refused = [&](const bs::LoraOptions& options, const std::string& says) {
    CHECK_THROWS_WITH(bs::make_lora_adapter(blocks, options, at::kCPU), ContainsSubstring(says));
  };
  refused({.rank = 2, .rank_pattern = {{"k_proj", 3}}}, "\"k_proj\" matches no adapted module");
  refused({.rank = 2, .targets = {"q_proj"}, .alpha_pattern = {{"up_proj", 3}}},
          "\"up_proj\" matches no adapted module");
  refused({.rank = 2, .rank_pattern = {{"q_proj", 0}}}, "rank of \"q_proj\"");
  refused({.rank = 2, .alpha_pattern = {{"q_proj", -1}}}, "alpha of \"q_proj\"");
  refused({.rank = 9}, "rank 9 is above what model.layers.0.self_attn.q_proj of shape [12, 8]");
  CHECK_NOTHROW(bs::make_lora_adapter(blocks, {.rank = 8}, at::kCPU));
}
