// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/architecture/decoder_tensors.hpp>

#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

namespace block_streamer::inline v1::detail {

/// A tensor name inside a decoder layer.
struct LayerName {
  std::uint64_t layer = 0;
  std::string_view relative;
};

/// Splits "model.layers.12.mlp.up_proj.weight". nullopt for any other name, also for an index that
/// is not spelled as the files spell it ("01"): layers.1 and layers.10 are told apart by number.
[[nodiscard]] inline std::optional<LayerName> parse_layer_name(std::string_view name) noexcept {
  if (!name.starts_with(decoder_layers_prefix)) return std::nullopt;
  name.remove_prefix(decoder_layers_prefix.size());
  LayerName parsed;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), parsed.layer);
  const auto digits = static_cast<std::size_t>(end - name.data());
  const bool plain = error == std::errc{} && digits < name.size() && name[digits] == '.' &&
                     (name[0] != '0' || digits == 1);
  if (!plain) return std::nullopt;
  parsed.relative = name.substr(digits + 1);
  return parsed;
}

/// Tables that the model computes from its configuration; old files store them.
[[nodiscard]] inline bool is_rotary_table(std::string_view name) noexcept {
  return name.ends_with("rotary_emb.inv_freq") || name.ends_with("rotary_emb.cos_cached") ||
         name.ends_with("rotary_emb.sin_cached");
}

/// The quantisation scheme that a tensor of this name belongs to; empty for an ordinary name.
[[nodiscard]] inline std::string_view quantization_scheme(std::string_view name) noexcept {
  struct Companion {
    std::string_view ending;
    std::string_view scheme;
  };
  static constexpr std::array<Companion, 17> companions{
      {{".weight_scale_inv", "FP8 with block scales"},
       {".weight_scale", "FP8 or compressed-tensors"},
       {".input_scale", "FP8 or compressed-tensors"},
       {".weight_zero_point", "compressed-tensors"},
       {".weight_packed", "compressed-tensors"},
       {".weight_shape", "compressed-tensors"},
       {".qweight", "GPTQ or AWQ"},
       {".qzeros", "GPTQ or AWQ"},
       {".scales", "GPTQ or AWQ"},
       {".g_idx", "GPTQ"},
       {".SCB", "bitsandbytes LLM.int8"},
       {".weight_format", "bitsandbytes LLM.int8"},
       {".weight.absmax", "bitsandbytes 4-bit"},
       {".weight.quant_map", "bitsandbytes 4-bit"},
       {".weight.nested_absmax", "bitsandbytes 4-bit"},
       {"_blocks", "MXFP4"},
       {"_scales", "MXFP4"}}};
  if (name.find(".weight.quant_state.") != std::string_view::npos) return "bitsandbytes 4-bit";
  for (const Companion& companion : companions) {
    if (name.ends_with(companion.ending)) return companion.scheme;
  }
  return {};
}

}  // namespace block_streamer::inline v1::detail
