// SPDX-License-Identifier: Apache-2.0
// The forecast against what LibTorch allocates, in fp32: products in half types take scratch memory
// through an interface that the counting allocator cannot have.
#include <ATen/ATen.h>

#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/finetune/training_loop.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/plan/memory_forecast.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <string>
#include <utility>
#include <vector>

#include <support/catch.hpp>
#include <support/safetensors_files.hpp>
#include <train/device_meter.hpp>

namespace bs = block_streamer;

namespace {

using Streamer =
    bs::Streamer<bs::models::DecoderBlock, bs::FileStorage, bs::ExternalOptimizer, bs::HostBackend>;

constexpr std::uint64_t hidden = 96, inner = 256, heads = 4, kv_heads = 2, head_dim = 32,
                        vocabulary = 700, layers = 5;

/// A model whose tensors all are of some size, so that what is not forecast (index tensors,
/// scalars) is small beside them.
std::filesystem::path write_model(const support::TempFolder& folder, bool qwen) {
  const std::string config =
      std::string{R"({"model_type":")"} + (qwen ? "qwen3" : "llama") +
      R"(","hidden_size":96,"intermediate_size":256,"num_hidden_layers":5,"num_attention_heads":4,)"
      R"("num_key_value_heads":2,"head_dim":32,"vocab_size":700,"max_position_embeddings":2048,)"
      R"("rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu","tie_word_embeddings":true})";
  support::write_text(folder / "config.json", config);
  std::vector<std::pair<std::string, bs::Shape>> shapes{
      {"model.embed_tokens.weight", {vocabulary, hidden}}, {"model.norm.weight", {hidden}}};
  for (std::uint64_t i = 0; i < layers; ++i) {
    const std::string p = "model.layers." + std::to_string(i) + ".";
    shapes.insert(shapes.end(), {{p + "input_layernorm.weight", {hidden}},
                                 {p + "post_attention_layernorm.weight", {hidden}},
                                 {p + "self_attn.q_proj.weight", {heads * head_dim, hidden}},
                                 {p + "self_attn.k_proj.weight", {kv_heads * head_dim, hidden}},
                                 {p + "self_attn.v_proj.weight", {kv_heads * head_dim, hidden}},
                                 {p + "self_attn.o_proj.weight", {hidden, heads * head_dim}},
                                 {p + "mlp.gate_proj.weight", {inner, hidden}},
                                 {p + "mlp.up_proj.weight", {inner, hidden}},
                                 {p + "mlp.down_proj.weight", {hidden, inner}}});
    if (!qwen) continue;
    shapes.push_back({p + "self_attn.q_norm.weight", {head_dim}});
    shapes.push_back({p + "self_attn.k_norm.weight", {head_dim}});
  }
  std::vector<at::Tensor> tensors;
  std::vector<bs::TensorBytes> bytes;
  for (const auto& [name, shape] : shapes) {
    std::vector<std::int64_t> sizes(shape.begin(), shape.end());
    tensors.push_back(at::randn(sizes).mul(0.05));
    bytes.push_back({{name, bs::DType::f32, shape}, bs::bytes_of(tensors.back())});
  }
  bs::write_safetensors(folder / "model.safetensors", bytes);
  return folder.path();
}

struct Case {
  std::size_t rows = 1, batch = 1;
  std::size_t length = 512;
  double dropout = 0;
  bool qwen = false;
  bool together = true;
};

/// What LibTorch held most, beside what was there before the model.
std::uint64_t measured(const std::filesystem::path& folder, const Case& c) {
  const support::DeviceMeter meter{1};
  bs::models::DecoderModel model{bs::Checkpoint::open(folder), {.dtype = bs::DType::f32}};
  bs::StreamerOptions options;
  Streamer streamer{model.blocks(), bs::FileStorage{model.block_map()}, bs::HostBackend{}, options};
  const auto sites =
      bs::lora_blocks_of<bs::models::DecoderBlock>(model.blocks(), model.layout().blocks);
  const bs::LoraAdapter adapter =
      bs::make_lora_adapter(sites, {.rank = 4, .dropout = c.dropout}, at::kCPU);
  streamer.attach(adapter.table(sites));
  std::vector<bs::TextRow> rows(c.rows);
  std::vector<std::size_t> numbers;
  for (bs::TextRow& row : rows) {
    for (std::size_t t = 0; t < c.length; ++t) {
      row.tokens.push_back(static_cast<std::int32_t>((31 * t + numbers.size()) % vocabulary));
      row.trained.push_back(1);
    }
    numbers.push_back(numbers.size());
  }
  bs::TrainingLoop loop{model,
                        streamer,
                        {.micro_batches = c.together ? bs::MicroBatchOrder::together
                                                     : bs::MicroBatchOrder::sequential}};
  for (int step = 0; step < 2; ++step) REQUIRE(loop.step(rows, numbers, c.batch, 1e-3));
  return meter.peak();
}

std::uint64_t predicted(const Case& c) {
  bs::DecoderWork work;
  work.widths = {hidden, inner, heads * head_dim, kv_heads * head_dim, c.qwen};
  work.vocabulary = vocabulary;
  work.tokens = c.batch * c.length;
  work.passes = c.together ? c.rows / c.batch : 1;
  work.item = bs::byte_count_of(bs::DType::f32);
  work.kept_inputs = layers;
  work.scored = work.tokens;
  work.head_rows = (std::uint64_t{128} << 20) / 4 / vocabulary;
  work.adapters = true;
  work.dropout = c.dropout > 0;
  bs::MemoryForecast forecast;
  forecast.resident = (vocabulary + 1) * hidden * work.item;
  // Rows of A and columns of B of the seven maps of a layer.
  const std::uint64_t sides =
      7 * hidden + 2 * heads * head_dim + 2 * kv_heads * head_dim + 3 * inner;
  forecast.trained = 16 * 4 * layers * sides;  // four tensors of fp32, rank 4
  bs::add_work(forecast, work, false);
  return forecast.device();
}

}  // namespace

TEST_CASE("what a step of LoRA takes is forecast from shapes") {
  const support::TempFolder plain, normed;
  write_model(plain, false);
  write_model(normed, true);
  const Case c = GENERATE(Case{}, Case{.length = 1024}, Case{.rows = 4, .batch = 4},
                          Case{.rows = 4, .batch = 1}, Case{.rows = 4, .together = false},
                          Case{.dropout = 0.1}, Case{.qwen = true});
  const double is = static_cast<double>(measured((c.qwen ? normed : plain).path(), c));
  const double said = static_cast<double>(predicted(c));
  CAPTURE(c.rows, c.batch, c.length, c.dropout, c.qwen, c.together, is, said);
  CHECK(said / is >= 0.9);
  CHECK(said / is <= 1.1);
}
