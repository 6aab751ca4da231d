// SPDX-License-Identifier: Apache-2.0
// What a finetune was begun with, so that it is not gone on with otherwise.
#pragma once

#include "jobs.hpp"

#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/finetune/run_record.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/text/text_row.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <span>
#include <string>

namespace block_streamer_cli {
namespace detail {

class Sum {
 public:
  template <class T>
  void add(std::span<const T> values) {
    value_ = block_streamer::crc32c(std::as_bytes(values), value_);
  }
  void add(const std::string& text) { add(std::span{text.data(), text.size()}); }
  void add(const at::Tensor& tensor) {
    const at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
    add(std::span<const std::byte>{block_streamer::bytes_of(host)});
  }
  [[nodiscard]] std::string text() const { return "sum " + std::to_string(value_); }

 private:
  std::uint32_t value_ = 0;
};

/// Configuration, names, types, shapes and the final norm: not all of the weights, which would have
/// to be read for it.
[[nodiscard]] inline std::string model_sum(const block_streamer::models::DecoderModel& model) {
  Sum sum;
  sum.add(block_streamer::read_small_file(model.checkpoint().folder() / "config.json",
                                          std::uint64_t{1} << 28));
  for (const auto& tensor : model.checkpoint().tensors()) {
    sum.add(tensor.spec.name + " " + std::string{block_streamer::name_of(tensor.spec.dtype)});
    sum.add(std::span<const std::uint64_t>{tensor.spec.shape});
  }
  sum.add(model.final_norm());
  return sum.text();
}

/// Tokens and what of them is trained: another tokenizer or template gives another sum.
[[nodiscard]] inline std::string data_sum(std::span<const block_streamer::TextRow> rows) {
  Sum sum;
  for (const auto& row : rows) {
    sum.add(std::span<const std::int32_t>{row.tokens});
    sum.add(std::span<const std::uint8_t>{row.trained});
    sum.add(std::span<const std::uint32_t>{row.sequences});
  }
  return counted(rows.size(), "row") + ", " + sum.text();
}

template <class Values>
[[nodiscard]] std::string joined(const Values& values) {
  std::string text;
  for (const auto& value : values) {
    if (!text.empty()) text += ",";
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) {
      text += std::to_string(value);
    } else {
      text += value;
    }
  }
  return text;
}

}  // namespace detail

/// @brief And the form of the adapter, as it begins.
inline void add_adapter_form(block_streamer::RunRecord& record,
                             const block_streamer::LoraAdapter& adapter) {
  std::set<std::uint64_t> ranks;
  std::set<double> alphas;
  std::set<std::size_t> blocks;
  detail::Sum start;
  for (const auto& module : adapter.modules()) {
    ranks.insert(module.rank);
    alphas.insert(module.alpha);
    blocks.insert(module.site.block);
    start.add(module.site.module + " " + std::to_string(module.rank) + " " +
              std::to_string(module.alpha));
    start.add(module.a);
    start.add(module.b);
  }
  record.set("--rank", detail::joined(ranks));
  record.set("--alpha", detail::joined(alphas));
  record.set("--rslora", std::string{adapter.options().use_rslora ? "on" : "off"});
  record.set("--dropout", adapter.options().dropout);
  record.set("--top-fraction", std::to_string(blocks.size()) + " layers from " +
                                   std::to_string(*blocks.begin()) + " on");
  record.set("--targets", detail::joined(adapter.saved_targets().modules));
  record.set("--adapter", start.text());
}

/// @brief What every run is begun with. @param steps  of the whole run.
[[nodiscard]] inline block_streamer::RunRecord finetune_record(
    const FinetuneOptions& options, const block_streamer::models::DecoderModel& model,
    std::span<const block_streamer::TextRow> rows, std::uint64_t steps) {
  block_streamer::RunRecord record;
  record.set("--mode", std::string{options.mode == FinetuneMode::full ? "full" : "lora"});
  record.set("--dtype", std::string{block_streamer::name_of(model.dtype())});
  record.set("--device", std::string{model.device().is_cpu() ? "cpu" : "cuda"});
  record.set("--model", detail::model_sum(model));
  record.set("--seq-len", options.seq_len);
  record.set("--pack", std::string{options.pack ? "on" : "off"});
  record.set("--data", detail::data_sum(rows));
  record.set("--batch", options.batch);
  record.set("--grad-accum", options.grad_accum);
  record.set("--steps", steps);
  record.set("--lr", peak_rate(options));
  record.set("--weight-decay", options.weight_decay);
  constexpr const char* shapes[] = {"constant", "linear", "cosine"};
  record.set("--schedule", std::string{shapes[static_cast<int>(options.schedule)]});
  record.set("--warmup-steps", options.warmup_steps);
  record.set("--max-grad-norm", options.max_grad_norm.value_or(0));
  record.set("--shuffle", std::string{options.shuffle ? "on" : "off"});
  record.set("--seed", options.seed);
  return record;
}

}  // namespace block_streamer_cli
