// SPDX-License-Identifier: Apache-2.0
// Packed rows train as the same rows apart.
#include <ATen/ATen.h>

#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/finetune/evaluation.hpp>
#include <block_streamer/finetune/training_loop.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/models/resident_weights.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/streamer.hpp>
#include <block_streamer/text/packing.hpp>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

const char* const models[] = {"llama_gqa", "qwen3_tied"};

bs::models::DecoderModel open_model(const std::string& name, bs::DType dtype = bs::DType::f32) {
  return bs::models::DecoderModel{
      bs::Checkpoint::open(std::string{BLOCK_STREAMER_TEST_FIXTURES} + "/models/" + name), {dtype}};
}

at::Tensor hidden_of(const bs::models::DecoderModel& model, const at::Tensor& ids,
                     const bs::models::ContextOptions& options = {}) {
  auto blocks = model.blocks();
  const auto weights = bs::models::resident_weights(model);
  auto context = model.context(ids, options);
  return bs::resident_forward(std::span{blocks}, std::span<const std::vector<at::Tensor>>{weights},
                              model.embed(ids), context);
}

at::Tensor some_ids(std::int64_t count, std::int64_t first) {
  return at::arange(first, first + 5 * count, 5, at::kLong).remainder(50).unsqueeze(0);
}

std::vector<bs::TextRow> short_rows() {
  std::vector<bs::TextRow> rows;
  for (std::size_t i = 0; i < 5; ++i) {
    bs::TextRow row;
    for (std::size_t t = 0; t < 4 + 3 * i; ++t) {
      row.tokens.push_back(static_cast<std::int32_t>((7 * i + 5 * t) % 50));
      row.trained.push_back(t > i ? 1 : 0);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

struct Trained {
  bs::StepReport report;
  std::vector<at::Tensor> gradients, parameters;
};

/// One step over all rows, `batch` of them a pass.
Trained train(const std::string& name, const std::vector<bs::TextRow>& rows, std::size_t batch) {
  const auto model = open_model(name);
  bs::StreamerOptions streaming;
  streaming.dtype = bs::DType::f32;
  bs::Streamer streamer{model.blocks(), bs::FileStorage{model.block_map()},
                        bs::HostBackend{bs::HostMode::attached}, streaming};
  std::vector<bs::LoraBlock> list;
  const auto blocks = model.blocks();
  for (std::size_t i = 0; i < blocks.size(); ++i)
    list.push_back({model.layout().blocks[i].prefix, blocks[i].weight_specs()});
  bs::LoraOptions options;
  options.rank = 4;
  auto adapter = bs::make_lora_adapter(list, options, at::kCPU);
  {  // B is zero at the start: nothing but B would have a gradient
    const c10::NoGradGuard no_grad;
    at::manual_seed(3);
    for (at::Tensor& parameter : adapter.parameters())
      parameter.add_(at::randn_like(parameter), 0.1);
  }
  streamer.attach(adapter.table(list));
  bs::TrainingLoop loop{model, streamer};
  std::vector<std::size_t> numbers(rows.size());
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  Trained done{*loop.step(rows, numbers, batch, 1e-2), {}, {}};
  for (const at::Tensor& parameter : adapter.parameters()) {
    done.gradients.push_back(parameter.grad());
    done.parameters.push_back(parameter);
  }
  return done;
}

}  // namespace

TEST_CASE("a packed sequence gives what it gives alone, and sees nothing of its neighbours") {
  const c10::NoGradGuard no_grad;
  const std::vector<std::int64_t> lengths{5, 1, 9};
  for (const char* name : models) {
    const auto model = open_model(name);
    const at::Tensor ids = some_ids(15, 3);
    const at::Tensor packed = hidden_of(model, ids, {.sequences = lengths});
    std::int64_t begin = 0;
    for (const std::int64_t length : lengths) {
      const at::Tensor alone = hidden_of(model, ids.narrow(1, begin, length));
      const at::Tensor same = packed.narrow(1, begin, length);
      CHECK(at::allclose(same, alone, 1e-5, 1e-5));
      begin += length;
    }
    // Not a bit of the others moves when a sequence is another one.
    at::Tensor other = ids.clone();
    other.narrow(1, 6, 9).add_(1);
    const at::Tensor changed = hidden_of(model, other, {.sequences = lengths});
    CHECK(at::equal(changed.narrow(1, 0, 6), packed.narrow(1, 0, 6)));
    CHECK_FALSE(at::allclose(changed.narrow(1, 6, 9), packed.narrow(1, 6, 9), 1e-2, 1e-2));
  }
}

TEST_CASE("a step over packed rows has the loss and the gradients of the rows apart") {
  const auto rows = short_rows();
  for (const char* name : models) {
    const Trained apart = train(name, rows, 1);
    for (const std::size_t capacity : {std::size_t{16}, std::size_t{100}}) {
      const auto packed = bs::pack_rows(rows, capacity);
      REQUIRE(packed.size() < rows.size());
      for (const std::size_t batch : {std::size_t{1}, std::size_t{2}}) {
        const Trained together = train(name, packed, batch);
        CHECK(together.report.loss == Approx(apart.report.loss).epsilon(1e-6));
        CHECK(together.report.trained == apart.report.trained);
        CHECK(together.report.tokens == apart.report.tokens);
        CHECK(together.report.gradient_norm == Approx(apart.report.gradient_norm).epsilon(1e-5));
        for (std::size_t i = 0; i < apart.gradients.size(); ++i)
          CHECK(at::allclose(together.gradients[i], apart.gradients[i], 1e-4, 1e-6));
      }
    }
  }
}

TEST_CASE("packed rows of a pass lie one behind the other, without padding") {
  const auto packed = bs::pack_rows(short_rows(), 20);
  REQUIRE(packed.size() == 3);
  const std::size_t numbers[] = {0, 2};
  const auto batch = bs::make_row_batch(packed, numbers);
  CHECK(batch.ids.size(0) == 1);
  CHECK(batch.ids.size(1) == static_cast<std::int64_t>(batch.tokens));
  CHECK(std::accumulate(batch.sequences.begin(), batch.sequences.end(), std::int64_t{0}) ==
        batch.ids.size(1));
  CHECK(batch.sequences.size() == packed[0].sequences.size() + packed[2].sequences.size());
  const auto plain = bs::make_row_batch(short_rows(), numbers);
  CHECK(plain.sequences.empty());
}

TEST_CASE("packed rows are scored as the rows apart") {
  const auto rows = short_rows();
  const auto packed = bs::pack_rows(rows, 20);
  const auto model = open_model("llama_gqa");
  bs::StreamerOptions streaming;
  streaming.dtype = bs::DType::f32;
  bs::Streamer streamer{model.blocks(), bs::FileStorage{model.block_map()},
                        bs::HostBackend{bs::HostMode::attached}, streaming};
  const auto apart = bs::evaluate_rows(model, streamer, std::span{rows}, 2);
  const auto together = bs::evaluate_rows(model, streamer, std::span{packed}, 2);
  CHECK(together.scored == apart.scored);
  CHECK(together.tokens == apart.tokens);
  CHECK(together.mean_loss == Approx(apart.mean_loss).epsilon(1e-6));
}

TEST_CASE("what cannot be packed is refused") {
  const auto model = open_model("llama_gqa");
  const std::vector<std::int64_t> lengths{3, 4}, none{7, 0};
  CHECK_NOTHROW(model.context(1, 7, {.sequences = lengths}));
  CHECK_THROWS_AS(model.context(1, 8, {.sequences = lengths}), bs::ContractViolation);
  CHECK_THROWS_AS(model.context(2, 7, {.sequences = lengths}), bs::ContractViolation);
  CHECK_THROWS_AS(model.context(1, 7, {.sequences = none}), bs::ContractViolation);
  // Positions are those of a sequence: the pass may be longer than the model's.
  const auto most = static_cast<std::int64_t>(model.config().max_position);
  const std::vector<std::int64_t> both{most, most}, longer{most + 1, 1};
  CHECK_NOTHROW(model.context(1, 2 * most, {.sequences = both}));
  CHECK_THROWS_AS(model.context(1, most + 2, {.sequences = longer}), bs::Error);
}
