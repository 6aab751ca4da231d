// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <block_streamer/finetune/evaluation.hpp>
#include <block_streamer/finetune/row_order.hpp>
#include <block_streamer/finetune/training_loop.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <cmath>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

using Streamer =
    bs::Streamer<bs::models::DecoderBlock, bs::FileStorage, bs::ExternalOptimizer, bs::HostBackend>;

bs::StreamerOptions options_in_fp32() {
  bs::StreamerOptions options;
  options.dtype = bs::DType::f32;
  return options;
}

/// A tiny model from the fixtures behind a streamer with an adapter.
struct Tiny {
  Tiny()
      : model{bs::Checkpoint::open(std::string{BLOCK_STREAMER_TEST_FIXTURES} + "/models/llama_gqa"),
              {bs::DType::f32}},
        streamer{model.blocks(), bs::FileStorage{model.block_map()}, bs::HostBackend{},
                 options_in_fp32()} {
    std::vector<bs::LoraBlock> list;
    const auto blocks = model.blocks();
    for (std::size_t i = 0; i < blocks.size(); ++i)
      list.push_back({model.layout().blocks[i].prefix, blocks[i].weight_specs()});
    bs::LoraOptions options;
    options.rank = 4;
    adapter = bs::make_lora_adapter(list, options, at::kCPU);
    streamer.attach(adapter.table(list));
  }
  bs::models::DecoderModel model;
  Streamer streamer;
  bs::LoraAdapter adapter;
};

std::vector<bs::TextRow> some_rows() {
  std::vector<bs::TextRow> rows;
  for (std::size_t i = 0; i < 5; ++i) {
    bs::TextRow row;
    for (std::size_t t = 0; t < 6 + 3 * i; ++t) {
      row.tokens.push_back(static_cast<std::int32_t>((7 * i + 5 * t) % 50));
      row.trained.push_back(t > i ? 1 : 0);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

TEST_CASE("rows are padded at the right and padding is never trained") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 4};
  const auto batch = bs::make_row_batch(rows, numbers);
  CHECK(batch.ids.sizes() == at::IntArrayRef{2, 18});
  CHECK(batch.tokens == 24);
  CHECK(batch.trained[0].sum().item<int>() == 5);
  CHECK_FALSE(batch.trained[0][6].item<bool>());
  CHECK(batch.ids[1][17].item<int>() == rows[4].tokens[17]);
}

TEST_CASE("every row comes once an epoch, in another order each time, the same for a seed") {
  bs::RowOrder order{7, 3}, again{7, 3}, other{7, 4};
  const auto first = order.take(7), second = order.take(7);
  CHECK(std::set<std::size_t>(first.begin(), first.end()).size() == 7);
  CHECK(first != second);
  CHECK(again.take(14) == [&] {
    auto both = first;
    both.insert(both.end(), second.begin(), second.end());
    return both;
  }());
  CHECK(other.take(7) != first);
}

TEST_CASE("the loss and the gradient of a step do not depend on how its rows are split") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1, 2, 3, 4};
  std::vector<double> losses;
  std::vector<at::Tensor> weights;
  for (const std::size_t batch : {std::size_t{1}, std::size_t{2}, std::size_t{5}}) {
    Tiny tiny;
    bs::TrainingLoop loop{tiny.model, tiny.streamer};
    const auto report = loop.step(rows, numbers, batch, 1e-2);
    REQUIRE(report);
    CHECK(report->trained == 5 + 7 + 9 + 11 + 13);
    CHECK(report->tokens == 6 + 9 + 12 + 15 + 18);
    losses.push_back(report->loss);
    weights.push_back(tiny.adapter.parameters()[1].clone());
  }
  // Sums in another order: a few units in the last place of fp32.
  CHECK(losses[1] == Approx(losses[0]).epsilon(1e-6));
  CHECK(losses[2] == Approx(losses[0]).epsilon(1e-6));
  CHECK(at::allclose(weights[1], weights[0], 1e-3, 1e-5));
}

TEST_CASE("training lowers the loss that evaluation measures") {
  const auto rows = some_rows();
  Tiny tiny;
  const auto before = bs::evaluate_rows(tiny.model, tiny.streamer, rows, 2);
  bs::TrainingLoop loop{tiny.model, tiny.streamer};
  bs::RowOrder order{rows.size(), 1};
  for (int step = 0; step < 30; ++step) REQUIRE(loop.step(rows, order.take(3), 2, 1e-2));
  const auto after = bs::evaluate_rows(tiny.model, tiny.streamer, rows, 5);
  CHECK(before.scored == 45);
  CHECK(before.tokens == 60);
  CHECK(after.mean_loss < 0.9 * before.mean_loss);
  CHECK(tiny.streamer.is_training());
}

TEST_CASE("an evaluation that ends in an exception leaves the mode as it was") {
  const auto rows = some_rows();
  Tiny tiny;
  tiny.streamer.train();
  const auto fail = [](std::size_t) -> bool { throw std::runtime_error{"enough"}; };
  CHECK_THROWS_AS(bs::evaluate_rows(tiny.model, tiny.streamer, rows, 2, fail), std::runtime_error);
  CHECK(tiny.streamer.is_training());
}

TEST_CASE("a step that is stopped changes nothing") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1, 2};
  Tiny tiny;
  bs::TrainingLoop loop{tiny.model, tiny.streamer};
  const auto weight = tiny.adapter.parameters()[0].clone();
  int asked = 0;
  CHECK_FALSE(loop.step(rows, numbers, 1, 1e-2, [&] { return ++asked == 3; }));
  CHECK(at::equal(weight, tiny.adapter.parameters()[0]));
  CHECK(loop.steps() == 0);
}

TEST_CASE("a loss that is not finite names the step and where it begins") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1};
  Tiny tiny;
  bs::TrainingLoop loop{tiny.model, tiny.streamer};
  REQUIRE(loop.step(rows, numbers, 2, 1e-3));
  {
    const c10::NoGradGuard no_grad;
    const auto& modules = tiny.adapter.modules();
    for (const auto& module : modules) {
      if (module.site.block == 1) at::Tensor{module.b}.fill_(std::nan(""));
    }
  }
  CHECK_THROWS_WITH(loop.step(rows, numbers, 2, 1e-3),
                    Catch::Matchers::Contains("step 2") && Catch::Matchers::Contains("block 1"));
}
