// SPDX-License-Identifier: Apache-2.0
#include "letters.hpp"

#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/generate/text_generator.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/models/stream_head.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;
using namespace block_streamer_test;

namespace {

const std::vector<std::string> all_models{"qwen3_tied", "qwen3_sharded", "llama_gqa",
                                          "llama_scaled"};

/// A tiny model, streamed from its file with two resident blocks, in fp32.
struct Tiny {
  /// @param resident  whether embedding and head are; a head that is not has at least three slices.
  explicit Tiny(const std::string& name, bool resident = true)
      : model{bs::Checkpoint::open(std::filesystem::path{BLOCK_STREAMER_TEST_FIXTURES} / "models" /
                                   name),
              {.dtype = bs::DType::f32,
               .embedding_resident = resident,
               .head_resident = resident,
               .head_slice_elements = 640}},
        tokenizer{letters()},
        streamer{model.blocks(), bs::FileStorage{model.block_map()}, bs::HostBackend{}, options()} {
    if (!resident) {
      bs::models::stream_head(model, bs::FileStorage{model.head_map()}, bs::HostBackend{});
    }
  }
  static bs::StreamerOptions options() {
    bs::StreamerOptions result;
    result.dtype = bs::DType::f32;
    return result;
  }

  bs::GenerationReport generate(const std::vector<std::vector<std::int32_t>>& prompts,
                                const bs::GenerationOptions& generation,
                                const bs::GenerationObserver& observer = {}) {
    bs::TextGenerator generator{model, streamer, tokenizer};
    return generator.generate(prompts, generation, observer);
  }
  /// Greedy without a cache: the whole text again for each token.
  std::vector<std::int32_t> plain(std::vector<std::int32_t> ids, std::size_t count) {
    const std::size_t prompt = ids.size();
    // Rows of the embedding that no token names are never chosen.
    const auto named = static_cast<std::int64_t>(tokenizer.vocabulary_size());
    while (ids.size() < prompt + count) {
      const std::vector<std::int64_t> wide{ids.begin(), ids.end()};
      const at::Tensor input = at::tensor(wide).unsqueeze(0);  // (1,T)
      auto context = model.context(input);
      const at::Tensor logits = model.logits_last(streamer.forward(model.embed(input), context));
      ids.push_back(static_cast<std::int32_t>(
          at::argmax(logits.narrow(1, 0, std::min(named, logits.size(1)))).item<std::int64_t>()));
    }
    return {ids.begin() + static_cast<std::ptrdiff_t>(prompt), ids.end()};
  }

  bs::models::DecoderModel model;
  bs::Tokenizer tokenizer;
  bs::Streamer<bs::models::DecoderBlock, bs::FileStorage, bs::ExternalOptimizer, bs::HostBackend>
      streamer;
};

const std::vector<std::vector<std::int32_t>> four_prompts{
    ids_of("Once_upon"), ids_of("A"), ids_of("3+4=7,and_so_on_and_so_on"), ids_of("xy")};

/// What the error says; empty without one.
std::string message_of(const auto& action) {
  try {
    action();
  } catch (const bs::Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("tokens equal those of forwards over the whole text") {
  for (const std::string& name : all_models) {
    INFO(name);
    Tiny tiny{name};
    const auto prompt = four_prompts[0];
    const auto report = tiny.generate({prompt}, {.max_new_tokens = 12});
    CHECK(report.rows[0].ids == tiny.plain(prompt, 12));
    CHECK(report.passes == 12);
    CHECK(report.new_tokens == 12);
    CHECK(report.prompt_tokens == prompt.size());
    CHECK(report.rows[0].finish_reason == bs::FinishReason::length);
  }
}

TEST_CASE("a batch of prompts of unequal length equals single runs") {
  for (const std::string& name : all_models) {
    INFO(name);
    Tiny tiny{name};
    const bs::GenerationOptions options{.max_new_tokens = 10};
    const auto together = tiny.generate(four_prompts, options);
    for (std::size_t i = 0; i < four_prompts.size(); ++i) {
      CHECK(together.rows[i].ids == tiny.generate({four_prompts[i]}, options).rows[0].ids);
    }
    CHECK(together.passes == 10);
    CHECK(together.new_tokens == 40);
  }
}

TEST_CASE("what is not resident of embedding and head changes no token, and is read as needed") {
  for (const std::string& name : all_models) {
    INFO(name);
    Tiny resident{name}, off{name, /*resident=*/false};
    const bs::GenerationOptions greedy{.max_new_tokens = 10};
    const bs::GenerationOptions drawn{.max_new_tokens = 10, .sampling = {.temperature = 1.3}};
    for (const bs::GenerationOptions& options : {greedy, drawn}) {
      const auto expected = resident.generate(four_prompts, options);
      const auto report = off.generate(four_prompts, options);
      for (std::size_t i = 0; i < four_prompts.size(); ++i) {
        CHECK(report.rows[i].ids == expected.rows[i].ids);
      }
    }
    const std::size_t slices = off.model.head_slices().size();
    CHECK(slices >= 3);
    const bs::Statistics head = off.model.head_statistics();
    CHECK(head.passes == 20);  // one a token: the reading of the prompts makes the first
    CHECK(head.visits == 20 * slices);
    CHECK(head.peak_resident_blocks <= 2);
    // At most a row a letter of the prompts, a padding row, and one a row of a later pass.
    CHECK(off.model.embedding_reads().rows <= 2 * (44 + 1 + 9 * 4));
    CHECK(resident.model.head_statistics().visits == 0);
  }
}

TEST_CASE("rows of a batch end one by one") {
  Tiny tiny{"llama_gqa"};
  const auto free = tiny.generate(four_prompts, {.max_new_tokens = 10});
  const std::int32_t end = free.rows[2].ids[3];
  bs::GenerationOptions options{.max_new_tokens = 10, .eos_ids = {end}};
  const auto ended = tiny.generate(four_prompts, options);
  for (std::size_t i = 0; i < four_prompts.size(); ++i) {
    CHECK(ended.rows[i].ids == tiny.generate({four_prompts[i]}, options).rows[0].ids);
  }
  CHECK(ended.rows[2].finish_reason == bs::FinishReason::eos);
  CHECK(ended.rows[2].ids.size() <= 4);
}

TEST_CASE("a prompt read in chunks gives the same tokens in one pass") {
  for (const std::string& name : all_models) {
    INFO(name);
    Tiny tiny{name};
    const auto whole = tiny.generate(four_prompts, {.max_new_tokens = 6});
    for (const std::int64_t chunk : {1, 3, 8, 40}) {
      const auto cut = tiny.generate(four_prompts, {.max_new_tokens = 6, .chunk_tokens = chunk});
      for (std::size_t i = 0; i < four_prompts.size(); ++i) {
        CHECK(cut.rows[i].ids == whole.rows[i].ids);
      }
      CHECK(cut.passes == 6);
    }
  }
}

TEST_CASE("what a pass fetches does not depend on the number of rows") {
  Tiny tiny{"qwen3_sharded"};
  const auto fetched = [&](const std::vector<std::vector<std::int32_t>>& prompts) {
    tiny.streamer.drain();
    tiny.streamer.reset_stats();
    static_cast<void>(tiny.generate(prompts, {.max_new_tokens = 5}));
    tiny.streamer.drain();
    return tiny.streamer.statistics();
  };
  static_cast<void>(fetched({four_prompts[0]}));  // from here on the first blocks are there already
  const bs::Statistics one = fetched({four_prompts[0]});
  const bs::Statistics four = fetched(four_prompts);
  CHECK(one.passes == 5);
  CHECK(four.passes == 5);
  CHECK(four.bytes_read == one.bytes_read);
  CHECK(four.bytes_needed == one.bytes_needed);
  CHECK(four.peak_resident_blocks <= 2);
}

TEST_CASE("a row ends where the model's positions do") {
  Tiny tiny{"llama_gqa"};
  const auto positions = static_cast<std::size_t>(tiny.model.config().max_position);
  const std::vector<std::int32_t> nearly(positions - 3, 7);
  const auto report = tiny.generate({nearly}, {.max_new_tokens = 50});
  CHECK(report.rows[0].ids.size() == 4);  // the last one needs no position
  CHECK(report.rows[0].finish_reason == bs::FinishReason::positions);
  const std::vector<std::int32_t> full(positions, 7);
  CHECK(tiny.generate({full}, {.max_new_tokens = 50}).rows[0].ids.size() == 1);
}

TEST_CASE("prompts that cannot be continued are refused by number") {
  Tiny tiny{"llama_gqa"};
  const std::vector<std::int32_t> longer(tiny.model.config().max_position + 1, 7);
  CHECK(message_of([&] {
          static_cast<void>(tiny.generate({ids_of("a"), longer}, {}));
        }).find("prompt 2 has 97 tokens") != std::string::npos);
  CHECK(message_of([&] { static_cast<void>(tiny.generate({{}}, {})); }).find("no token") !=
        std::string::npos);
  CHECK_THROWS_AS(tiny.generate({{500}}, {}), bs::Error);
  CHECK(tiny.generate({ids_of("a")}, {.max_new_tokens = 2}).new_tokens == 2);  // usable after it
}

TEST_CASE("logits that are not finite end the run and name the first block that made them so") {
  Tiny tiny{"llama_gqa"};
  const auto blocks = tiny.model.blocks();
  std::vector<bs::LoraBlock> list;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    list.push_back({tiny.model.layout().blocks[i].prefix, blocks[i].weight_specs()});
  }
  const auto adapter = bs::make_lora_adapter(list, {.rank = 2}, at::kCPU);
  tiny.streamer.attach(adapter.table(list));
  for (const auto& module : adapter.modules()) {
    if (module.site.block == 1) module.b.detach().fill_(std::nan(""));
  }
  const std::string one = message_of(
      [&] { static_cast<void>(tiny.generate({four_prompts[0]}, {.max_new_tokens = 3})); });
  CHECK(one ==
        "the prompt, new token 1: the logits are not finite; the first value that is not is in the "
        "output of block 1");
  CHECK(message_of([&] {
          static_cast<void>(tiny.generate(four_prompts, {.max_new_tokens = 3}));
        }).starts_with("prompt 1, new token 1: "));
  for (const auto& module : adapter.modules()) module.b.detach().fill_(0);
  CHECK(tiny.generate({four_prompts[0]}, {.max_new_tokens = 3}).new_tokens == 3);
}

TEST_CASE("a caller may end a run between passes and keeps its text") {
  Tiny tiny{"qwen3_tied"};
  bs::GenerationObserver observer;
  std::vector<std::string> told(2);
  std::uint64_t seen = 0;
  observer.text = [&](std::size_t row, std::string_view text) { told[row] += text; };
  observer.pass = [&](std::uint64_t new_tokens) { seen = new_tokens; };
  observer.cancelled = [&] { return seen >= 6; };
  const auto report =
      tiny.generate({four_prompts[0], four_prompts[3]}, {.max_new_tokens = 50}, observer);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(report.rows[i].finish_reason == bs::FinishReason::cancelled);
    CHECK(report.rows[i].ids.size() == 3);
    CHECK(report.rows[i].text == told[i]);
    CHECK(told[i].size() == 3);
  }
}

TEST_CASE("sampled rows repeat with their seed") {
  Tiny tiny{"llama_scaled"};
  const bs::GenerationOptions options{
      .max_new_tokens = 8, .sampling = {.temperature = 1, .top_k = 20, .top_p = 0.9, .seed = 4}};
  const auto first = tiny.generate({four_prompts[0]}, options);
  CHECK(tiny.generate({four_prompts[0]}, options).rows[0].ids == first.rows[0].ids);
  bs::GenerationOptions other = options;
  other.sampling.seed = 5;
  CHECK(tiny.generate({four_prompts[0]}, other).rows[0].ids != first.rows[0].ids);
}
