// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/lora/target_matching.hpp>

#include <filesystem>
#include <string>
#include <vector>

/// The model of tests/fixtures/lora/base, as the adapters see it.
inline std::vector<block_streamer::LoraBlock> tiny_llama_blocks(
    const std::string& stem = "model.layers.") {
  std::vector<block_streamer::LoraBlock> blocks;
  for (int i = 0; i < 4; ++i)
    blocks.push_back({stem + std::to_string(i) + ".",
                      {{"input_layernorm.weight", {24}, false},
                       {"self_attn.q_proj.weight", {40, 24}, true},
                       {"self_attn.k_proj.weight", {20, 24}, true},
                       {"self_attn.v_proj.weight", {20, 24}, true},
                       {"self_attn.o_proj.weight", {24, 40}, true},
                       {"post_attention_layernorm.weight", {24}, false},
                       {"mlp.gate_proj.weight", {36, 24}, true},
                       {"mlp.up_proj.weight", {36, 24}, true},
                       {"mlp.down_proj.weight", {24, 36}, true}}});
  return blocks;
}

inline std::filesystem::path lora_fixture(const std::string& name) {
  return std::filesystem::path{BLOCK_STREAMER_TEST_FIXTURES} / "lora" / name;
}
