// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <block_streamer/finetune/evaluation.hpp>
#include <block_streamer/finetune/row_order.hpp>
#include <block_streamer/finetune/training_loop.hpp>
#include <block_streamer/finetune/training_state.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <support/catch.hpp>
#include <support/safetensors_files.hpp>

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
  explicit Tiny(double dropout = 0, const bs::StreamerOptions& streaming = options_in_fp32(),
                bs::HostMode mode = bs::HostMode::attached)
      : model{bs::Checkpoint::open(std::string{BLOCK_STREAMER_TEST_FIXTURES} + "/models/llama_gqa"),
              {bs::DType::f32}},
        streamer{model.blocks(), bs::FileStorage{model.block_map()}, bs::HostBackend{mode},
                 streaming} {
    std::vector<bs::LoraBlock> list;
    const auto blocks = model.blocks();
    for (std::size_t i = 0; i < blocks.size(); ++i)
      list.push_back({model.layout().blocks[i].prefix, blocks[i].weight_specs()});
    bs::LoraOptions options;
    options.rank = 4;
    options.dropout = dropout;
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

TEST_CASE(
    "passes of a step together and one after another have the same bits, wherever inputs wait") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {4, 0, 2, 3, 1};
  for (const double dropout : {0.0, 0.3}) {
    std::vector<double> expected;
    std::vector<at::Tensor> weights;
    std::vector<std::uint64_t> bytes;
    for (const auto order : {bs::MicroBatchOrder::sequential, bs::MicroBatchOrder::together}) {
      for (const auto place : {bs::ActivationPlace::device, bs::ActivationPlace::ram}) {
        bs::StreamerOptions streaming = options_in_fp32();
        streaming.activations.place = place;
        streaming.prefetch_ahead = 0;
        at::manual_seed(21);
        Tiny tiny{dropout, streaming, bs::HostMode::detached};
        bs::TrainingLoop loop{tiny.model, tiny.streamer, {.micro_batches = order}};
        std::vector<double> losses;
        for (int step = 0; step < 3; ++step) {
          const auto report = loop.step(rows, numbers, 2, 1e-2);
          losses.insert(losses.end(), {report->loss, report->gradient_norm});
          CHECK(report->tokens == 6 + 9 + 12 + 15 + 18);
        }
        bytes.push_back(tiny.streamer.statistics().bytes_needed);
        if (expected.empty()) {
          expected = losses;
          for (const at::Tensor& p : tiny.adapter.parameters())
            weights.push_back(p.detach().clone());
        }
        INFO("dropout " << dropout << " order " << static_cast<int>(order));
        CHECK(losses == expected);
        const auto parameters = tiny.adapter.parameters();
        for (std::size_t i = 0; i < weights.size(); ++i)
          CHECK(at::equal(parameters[i], weights[i]));
      }
    }
    CHECK(2 * bytes[2] < bytes[0]);  // three passes a step, fetched for once
    CHECK(bytes[3] == bytes[2]);
  }
}

TEST_CASE("steps draw other random numbers each time, also where nobody seeds between them") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1, 2, 3};
  at::manual_seed(3);
  Tiny tiny{0.5};
  bs::TrainingLoop loop{tiny.model, tiny.streamer};
  const auto first = loop.step(rows, numbers, 2, 1e-30)->gradient_norm;
  CHECK(loop.step(rows, numbers, 2, 1e-30)->gradient_norm != first);
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

TEST_CASE("steps are not recorded on the host, which changes nothing") {
  Tiny tiny, plain;
  bs::TrainingLoop loop{tiny.model, tiny.streamer}, other{plain.model, plain.streamer};
  CHECK_THROWS_AS(loop.record_steps(), bs::UnsupportedError);
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1, 4};
  CHECK(loop.step(rows, numbers, 2, 1e-2)->loss == other.step(rows, numbers, 2, 1e-2)->loss);
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
                    ContainsSubstring("step 2") && ContainsSubstring("block 1"));
}

namespace {

void poison(const Tiny& tiny, std::size_t block) {
  const c10::NoGradGuard no_grad;
  for (const auto& module : tiny.adapter.modules()) {
    if (module.site.block == block) at::Tensor{module.b}.fill_(std::nan(""));
  }
}

std::vector<at::Tensor> copies(const bs::LoraAdapter& adapter) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : adapter.parameters()) all.push_back(tensor.detach().clone());
  return all;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return at::equal(x, y); });
}

}  // namespace

TEST_CASE("clipping brings the global norm of a step's gradient down, as a smaller loss would") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1, 2, 3};
  Tiny free;
  bs::TrainingLoop plain{free.model, free.streamer};
  const auto first = plain.step(rows, numbers, 2, 1e-2);
  double sum = 0;  // the norm by hand, from what the step left in .grad
  for (const at::Tensor& p : free.adapter.parameters())
    sum += p.grad().to(at::kDouble).pow(2).sum().item<double>();
  CHECK(first->gradient_norm == Approx(std::sqrt(sum)).epsilon(1e-6));

  const double bound = first->gradient_norm / 8;
  Tiny tiny;
  bs::TrainingLoop clipped{tiny.model, tiny.streamer, {.max_grad_norm = bound}};
  const auto report = clipped.step(rows, numbers, 2, 1e-2);
  CHECK(report->gradient_norm == first->gradient_norm);
  const auto moments = clipped.optimizer().moments(), whole = plain.optimizer().moments();
  double ratio_seen = 0;
  for (std::size_t i = 0; i < moments.size(); ++i) {
    if (whole[i].exp_avg.norm().item<double>() == 0) continue;
    ratio_seen = (moments[i].exp_avg.norm() / whole[i].exp_avg.norm()).item<double>();
    CHECK(ratio_seen == Approx(0.125).epsilon(1e-4));
  }
  CHECK(ratio_seen != 0);
}

TEST_CASE("a step that is skipped names the block and leaves parameters and moments alone") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1, 2};
  Tiny tiny;
  bs::TrainingLoop loop{tiny.model, tiny.streamer, {.skip_non_finite = true}};
  REQUIRE(loop.step(rows, numbers, 2, 1e-3)->not_finite.empty());
  const auto good = copies(tiny.adapter);
  const at::Tensor moment = loop.optimizer().moments()[0].exp_avg.clone();
  poison(tiny, 1);
  const auto report = loop.step(rows, numbers, 2, 1e-3);
  REQUIRE(report);
  CHECK_THAT(report->not_finite, ContainsSubstring("block 1"));
  CHECK_FALSE(std::isfinite(report->loss));
  CHECK(loop.steps() == 2);
  CHECK(at::equal(loop.optimizer().moments()[0].exp_avg, moment));
  CHECK(loop.optimizer().moments()[0].step == 1);
  for (const at::Tensor& p : tiny.adapter.parameters()) CHECK_FALSE(p.grad().defined());
  {
    const c10::NoGradGuard no_grad;
    const auto parameters = tiny.adapter.parameters();
    for (std::size_t i = 0; i < good.size(); ++i) at::Tensor{parameters[i]}.copy_(good[i]);
  }
  CHECK(loop.step(rows, numbers, 2, 1e-3)->not_finite.empty());
  CHECK(loop.optimizer().moments()[0].step == 2);
}

TEST_CASE("a gradient that is not finite under a finite loss stops the step, or skips it") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1};
  for (const bool skip : {false, true}) {
    Tiny tiny;
    bs::TrainingOptions options{.skip_non_finite = skip};
    for (const auto& module : tiny.adapter.modules()) {
      const std::string block = "block " + std::to_string(module.site.block);
      options.labels.insert(options.labels.end(), {block + " A", block + " B"});
    }
    bs::TrainingLoop loop{tiny.model, tiny.streamer, options};
    // The backward meets block 1 before block 0: it is the one to be named.
    const auto parameters = tiny.streamer.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!options.labels[i].ends_with("B")) continue;
      parameters[i].register_hook([](const at::Tensor& gradient) {
        return gradient * std::numeric_limits<float>::infinity();
      });
    }
    const auto before = copies(tiny.adapter);
    if (skip) {
      const auto report = loop.step(rows, numbers, 2, 1e-3);
      CHECK_THAT(report->not_finite, ContainsSubstring("that of block 1 B"));
      CHECK(std::isfinite(report->loss));
      CHECK(loop.steps() == 1);
    } else {
      CHECK_THROWS_WITH(
          loop.step(rows, numbers, 2, 1e-3),
          ContainsSubstring("step 1: a gradient is not finite") && ContainsSubstring("block 1 B"));
      CHECK(loop.steps() == 0);
    }
    CHECK(same_bits(copies(tiny.adapter), before));
    for (const at::Tensor& p : tiny.adapter.parameters()) CHECK_FALSE(p.grad().defined());
  }
}

TEST_CASE("b121 a state that is taken up continues the run bit for bit, whichever step it is of") {
  const auto rows = some_rows();
  const support::TempFolder folder;
  const auto path = folder / "state.safetensors";
  const auto train = [&](auto& loop, std::uint64_t from, std::uint64_t to) {
    bs::RowOrder order{rows.size(), 5};
    order.seek(2 * from);
    for (std::uint64_t step = from; step < to; ++step)
      REQUIRE(loop.step(rows, order.take(2), 1, 1e-2 / static_cast<double>(step + 1)));
  };
  Tiny whole;
  bs::TrainingLoop uninterrupted{whole.model, whole.streamer};
  train(uninterrupted, 0, 6);
  for (const std::uint64_t stop : {std::uint64_t{1}, std::uint64_t{4}}) {
    bs::RunRecord record;
    record.set("--lr", 0.01);
    {
      Tiny tiny;
      bs::TrainingLoop loop{tiny.model, tiny.streamer};
      train(loop, 0, stop);
      bs::save_training_state(path, record, {stop, 1}, tiny.adapter.named_parameters(),
                              loop.optimizer());
    }
    const auto saved = bs::read_saved_run(path);
    REQUIRE(saved);
    CHECK(saved->position.step == stop);
    CHECK(saved->position.skipped == 1);
    CHECK(saved->record == std::map<std::string, std::string>{{"--lr", "0.01"}});
    Tiny tiny;
    bs::TrainingLoop loop{tiny.model, tiny.streamer};
    bs::load_training_state(path, tiny.adapter.named_parameters(), loop.optimizer());
    loop.set_steps(stop);
    train(loop, stop, 6);
    CHECK(same_bits(copies(tiny.adapter), copies(whole.adapter)));
  }
}

TEST_CASE("a state of another shape, with changed bytes or of another kind changes nothing") {
  const auto rows = some_rows();
  const std::size_t numbers[] = {0, 1};
  const support::TempFolder folder;
  const auto path = folder / "state.safetensors";
  CHECK_FALSE(bs::read_saved_run(path));
  Tiny tiny;
  bs::TrainingLoop loop{tiny.model, tiny.streamer};
  REQUIRE(loop.step(rows, numbers, 2, 1e-2));
  bs::save_training_state(path, {}, {1}, tiny.adapter.named_parameters(), loop.optimizer());
  const auto before = copies(tiny.adapter);
  const auto refused = [&](const std::string& says) {
    CHECK_THROWS_WITH(
        bs::load_training_state(path, tiny.adapter.named_parameters(), loop.optimizer()),
        ContainsSubstring(says));
    CHECK(same_bits(copies(tiny.adapter), before));
  };
  std::string bytes = support::read_text(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  support::write_text(path, bytes);
  refused("crc32c");
  auto parameters = tiny.adapter.named_parameters();
  parameters[0].tensor = parameters[0].tensor.detach().repeat({1, 2});
  bs::save_training_state(path, {}, {1}, parameters, bs::AdamW{});
  refused(parameters[0].name);
  parameters = tiny.adapter.named_parameters();
  parameters.pop_back();
  bs::save_training_state(path, {}, {1}, parameters, bs::AdamW{});
  refused("is missing");
  parameters = tiny.adapter.named_parameters();
  parameters.push_back({"another", parameters[0].tensor});
  bs::save_training_state(path, {}, {1}, parameters, bs::AdamW{});
  refused("parameter.another is unknown");
  bs::save_adapter(folder.path(), tiny.adapter);
  CHECK_THROWS_WITH(bs::read_saved_run(folder / "adapter_model.safetensors"),
                    ContainsSubstring("training state"));
}

TEST_CASE("no bit of what a state says of its run can change unseen, saved or only begun") {
  const support::TempFolder folder;
  const auto path = folder / "state.safetensors";
  const Tiny tiny;
  bs::RunRecord record;
  record.set("--lr", 0.01);
  for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{40}}) {
    bs::save_training_state(path, record, {step, 4}, tiny.adapter.named_parameters(), bs::AdamW{});
    const std::string whole = support::read_text(path);
    REQUIRE(bs::read_saved_run(path)->position.step == step);
    const std::size_t begin = whole.find("\"__metadata__\"");
    const std::size_t end = whole.find('}', begin);
    REQUIRE(begin < end);
    REQUIRE(end < whole.size());
    for (std::size_t at = begin; at <= end; ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        std::string changed = whole;
        changed[at] = static_cast<char>(changed[at] ^ (1 << bit));
        support::write_text(path, changed);
        CAPTURE(step, at - begin, bit);
        CHECK_THROWS_AS(bs::read_saved_run(path), bs::FormatError);
      }
    }
    support::write_text(path, whole);
  }
  std::string later = support::read_text(path);
  later[later.find("\"step\":\"40\"") + 8] = '6';
  support::write_text(path, later);
  CHECK_THROWS_WITH(bs::read_saved_run(path), ContainsSubstring("has changed since it was saved"));
}

TEST_CASE("a folder holds an adapter only with the same form and the same bits") {
  const support::TempFolder folder;
  Tiny tiny;
  CHECK_FALSE(bs::holds_adapter(folder.path(), tiny.adapter, "base"));
  bs::save_adapter(folder.path(), tiny.adapter, "base");
  CHECK(bs::holds_adapter(folder.path(), tiny.adapter, "base"));
  CHECK_FALSE(bs::holds_adapter(folder.path(), tiny.adapter, "other"));
  {
    const c10::NoGradGuard no_grad;
    at::Tensor{tiny.adapter.parameters()[3]}[0][0] = 1.0;
  }
  CHECK_FALSE(bs::holds_adapter(folder.path(), tiny.adapter, "base"));
}
