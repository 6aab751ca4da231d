// SPDX-License-Identifier: Apache-2.0
// Real decoders through the streamer against the same decoders fully resident: the same bits.
#include <ATen/ATen.h>

#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/models/llama.hpp>
#include <block_streamer/models/resident_weights.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/streamer.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <ATen/autocast_mode.h>

#include <support/catch.hpp>
#include <support/same_bits.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;
using support::same_bits;
using Block = bs::models::DecoderBlock;
using Streamer = bs::Streamer<Block, bs::AnyStorage, bs::ExternalOptimizer, bs::HostBackend>;

namespace {

bs::AnyStorage storage_of(const bs::models::DecoderModel& model, const std::string& tier) {
  if (tier == "ram") return bs::RamStorage::load(model.block_map());
  if (tier == "mapped") return bs::MappedStorage{model.block_map()};
  return bs::FileStorage{model.block_map()};
}

std::vector<bs::LoraBlock> lora_blocks(const bs::models::DecoderModel& model) {
  std::vector<bs::LoraBlock> list;
  const auto blocks = model.blocks();
  for (std::size_t i = 0; i < blocks.size(); ++i)
    list.push_back({model.layout().blocks[i].prefix, blocks[i].weight_specs()});
  return list;
}

struct Step {
  at::Tensor logits;
  std::vector<at::Tensor> gradients;
  friend bool operator==(const Step& a, const Step& b) {
    bool same = same_bits(a.logits, b.logits) && a.gradients.size() == b.gradients.size();
    for (std::size_t i = 0; same && i < a.gradients.size(); ++i)
      same = same_bits(a.gradients[i], b.gradients[i]);
    return same;
  }
};

/// Logits and adapter gradients of a next-token loss through `forward(hidden, context)`.
template <class Forward>
Step step(const bs::models::DecoderModel& model, const bs::LoraAdapter& adapter,
          const at::Tensor& ids, Forward&& forward) {
  for (const at::Tensor& p : adapter.parameters()) p.mutable_grad() = at::Tensor{};
  auto context = model.context(ids);
  Step result{model.logits(forward(model.embed(ids), context)), {}};
  bs::token_loss(result.logits, ids, at::ones(ids.sizes(), at::kBool)).sum.backward();
  for (const at::Tensor& p : adapter.parameters()) result.gradients.push_back(p.grad());
  result.logits = result.logits.detach();
  return result;
}

/// Streams a model in every way asked for and compares with the resident run.
std::size_t compare(const fs::path& folder, bs::DType dtype, const at::Tensor& ids,
                    const std::vector<std::uint32_t>& depths,
                    const std::vector<std::uint64_t>& chunks) {
  const bs::models::DecoderModel model{bs::Checkpoint::open(folder), {dtype}};
  const auto list = lora_blocks(model);
  bs::LoraOptions lora;
  lora.rank = 4;
  const auto adapter = bs::make_lora_adapter(list, lora, at::kCPU);
  for (const auto& module : adapter.modules()) {
    const c10::NoGradGuard no_grad;
    at::Tensor{module.b}.fill_(0.01);
  }
  const auto table = adapter.table(list);
  auto blocks = model.blocks();
  const auto weights = bs::models::resident_weights(model);
  const Step expected = step(model, adapter, ids, [&](const at::Tensor& hidden, auto& context) {
    return bs::resident_forward<Block>(blocks, weights, hidden, context, &table, true);
  });
  std::size_t combinations = 0;
  for (const std::string tier : {"ram", "mapped", "file"}) {
    for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
      for (const std::uint32_t depth : depths) {
        for (const std::uint64_t chunk : chunks) {
          bs::StreamerOptions options;
          options.prefetch_ahead = depth;
          options.chunk_byte_count = chunk;
          options.dtype = dtype;
          Streamer streamer{model.blocks(), storage_of(model, tier), bs::HostBackend{mode},
                            options};
          streamer.attach(adapter.table(list));
          streamer.train();
          const Step streamed =
              step(model, adapter, ids, [&](const at::Tensor& hidden, auto& context) {
                return streamer.forward(hidden, context);
              });
          INFO(folder << " " << tier << " ahead " << depth << " chunk " << chunk << " "
                      << bs::name_of(dtype));
          CHECK(streamed == expected);
          CHECK(streamer.statistics().peak_resident_blocks <= depth + 1);
          ++combinations;
        }
      }
    }
  }
  return combinations;
}

}  // namespace

TEST_CASE("the example of the README") {
  const fs::path folder = fs::path{BLOCK_STREAMER_TEST_FIXTURES} / "models" / "llama_gqa";
  const at::Tensor ids = at::arange(8, at::kLong).view({1, 8});
  auto checkpoint = bs::Checkpoint::open(folder);
  auto model = bs::models::Llama{checkpoint};
  bs::Streamer streamer{
      model.blocks(), bs::FileStorage{model.block_map()}, bs::HostBackend{}, {.prefetch_ahead = 1}};
  at::Tensor hidden = streamer.forward(model.embed(ids), model.context(ids));
  at::Tensor logits = model.logits(hidden);
  CHECK(logits.sizes() ==
        at::IntArrayRef{1, 8, static_cast<std::int64_t>(model.config().vocabulary_size)});
}

TEST_CASE("tiny decoders: streamed equals resident bit for bit, forward and gradients") {
  std::size_t combinations = 0;
  for (const std::string name : {"llama_gqa", "llama_scaled", "qwen3_tied", "qwen3_sharded"}) {
    const auto ids = at::arange(1, 19, at::kLong).view({2, 9});
    for (const bs::DType dtype : {bs::DType::f32, bs::DType::bf16, bs::DType::f16}) {
      const bool all = name == "qwen3_sharded" || name == "llama_gqa";
      combinations += compare(
          fs::path{BLOCK_STREAMER_TEST_FIXTURES} / "models" / name, dtype, ids,
          all ? std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5} : std::vector<std::uint32_t>{1},
          {1000, std::uint64_t{4} << 20});
    }
  }
  WARN(combinations << " combinations");
}

TEST_CASE(
    "tiny decoders under autocast: streamed equals resident bit for bit, near the uncast run") {
  for (const std::string name : {"llama_gqa", "qwen3_tied"}) {
    const bs::models::DecoderModel model{
        bs::Checkpoint::open(fs::path{BLOCK_STREAMER_TEST_FIXTURES} / "models" / name),
        {bs::DType::f32}};
    const auto ids = at::arange(1, 19, at::kLong).view({2, 9});
    const auto list = lora_blocks(model);
    const auto adapter = bs::make_lora_adapter(list, {.rank = 4}, at::kCPU);
    const auto table = adapter.table(list);
    auto blocks = model.blocks();
    const auto weights = bs::models::resident_weights(model);
    Streamer streamer{model.blocks(), storage_of(model, "ram"), bs::HostBackend{}};
    streamer.attach(adapter.table(list));
    streamer.train();
    const auto resident = [&](const at::Tensor& hidden, auto& context) {
      return bs::resident_forward<Block>(blocks, weights, hidden, context, &table, true);
    };
    const Step uncast = step(model, adapter, ids, resident);
    const auto cast = [](auto forward) {  // around the blocks alone
      return [forward](const at::Tensor& hidden, auto& context) {
        at::autocast::set_autocast_enabled(at::kCPU, true);
        const at::Tensor output = forward(hidden, context);
        at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(at::kCPU, false);
        return output.to(at::kFloat);
      };
    };
    const Step expected = step(model, adapter, ids, cast(resident));
    const Step streamed =
        step(model, adapter, ids, cast([&](const at::Tensor& hidden, auto& context) {
               return streamer.forward(hidden, context);
             }));
    INFO(name);
    CHECK(streamed == expected);
    CHECK_FALSE(uncast == expected);
    CHECK(at::allclose(uncast.logits, expected.logits, 0.1, 0.1));
  }
}

TEST_CASE("SmolLM2: streamed equals resident bit for bit, each tier and mode") {
  const char* given = std::getenv("BLOCK_STREAMER_SMOLLM2");
  const fs::path folder =
      given != nullptr ? given : BLOCK_STREAMER_SOURCE_DIR "/models/SmolLM2-135M-Instruct";
  if (!fs::exists(folder / "model.safetensors")) {
    WARN("skipped: no model in " << folder << " (examples/quickstart.sh prepares it)");
    return;
  }
  const auto ids = at::arange(100, 124, at::kLong).view({1, 24});
  WARN(compare(folder, bs::DType::f32, ids, {1}, {std::uint64_t{4} << 20}) << " combinations");
}
