// SPDX-License-Identifier: Apache-2.0
// What a finetune was begun with, so that it is not gone on with otherwise.
#pragma once

#include "jobs.hpp"

#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/crc32c.hpp>
#include <block_streamer/checkpoint/json_file.hpp>
#include <block_streamer/core/number_text.hpp>
#include <block_streamer/finetune/run_record.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/os/file.hpp>
#include <block_streamer/text/text_row.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

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

/// The first and the middle 4 KiB of each tensor, as they lie in the files.
/// @throws StorageError naming the file that cannot be read.
inline void add_sampled_weights(Sum& sum, const block_streamer::Checkpoint& checkpoint) {
  std::map<std::uint32_t, block_streamer::File> files;
  std::vector<std::byte> bytes;
  for (const auto& tensor : checkpoint.tensors()) {
    const auto& path = checkpoint.files()[tensor.file];
    const auto [file, fresh] = files.try_emplace(tensor.file);
    if (fresh) file->second = block_streamer::File::open(path);
    const std::uint64_t size = tensor.range.byte_count;
    for (const std::uint64_t begin : {std::uint64_t{0}, size / 2}) {
      bytes.resize(std::min<std::uint64_t>(4096, size - begin));
      if (const auto error = file->second.read_at(tensor.range.offset + begin, bytes))
        throw block_streamer::StorageError{path.string(), "cannot be read", error};
      sum.add(std::span<const std::byte>{bytes});
    }
  }
}

/// Configuration, names, types, shapes and a sample of all weights: to read them all would take as
/// long as a pass.
[[nodiscard]] inline std::string model_sum(const block_streamer::models::DecoderModel& model) {
  Sum sum;
  sum.add(block_streamer::read_small_file(model.checkpoint().folder() / "config.json",
                                          std::uint64_t{1} << 28));
  for (const auto& tensor : model.checkpoint().tensors()) {
    sum.add(tensor.spec.name + " " + std::string{block_streamer::name_of(tensor.spec.dtype)});
    sum.add(std::span<const std::uint64_t>{tensor.spec.shape});
  }
  add_sampled_weights(sum, model.checkpoint());
  return "weights of " + sum.text();
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

/// As --dtype spells it.
[[nodiscard]] inline std::string option_name(block_streamer::DType dtype) {
  using block_streamer::DType;
  return dtype == DType::f32 ? "fp32" : dtype == DType::f16 ? "fp16" : "bf16";
}

/// @brief What every run is begun with. @param steps  of the whole run.
[[nodiscard]] inline block_streamer::RunRecord finetune_record(
    const FinetuneOptions& options, const block_streamer::models::DecoderModel& model,
    std::span<const block_streamer::TextRow> rows, std::uint64_t steps) {
  block_streamer::RunRecord record;
  record.set("--mode", std::string{options.mode == FinetuneMode::full ? "full" : "lora"});
  record.set("--dtype", option_name(model.dtype()));
  record.set("--device", std::string{model.device().is_cpu() ? "cpu" : "cuda"});
  record.set("--model", detail::model_sum(model));
  record.set("--seq-len", options.seq_len);
  record.set("--pack", std::string{options.pack ? "on" : "off"});
  record.set("--eval-fraction",
             options.eval_fraction ? block_streamer::number_text(*options.eval_fraction) : "none");
  record.set("--data", detail::data_sum(rows));
  record.set("--batch", options.batch);
  record.set("--grad-accum", options.grad_accum);
  record.set("--steps", steps);
  record.set("--lr", peak_rate(options));
  record.set("--weight-decay", options.weight_decay);
  constexpr const char* shapes[] = {"constant", "linear", "cosine"};
  record.set("--schedule", std::string{shapes[static_cast<int>(options.schedule)]});
  record.set("--warmup-steps", options.warmup_steps);
  record.set("--max-grad-norm",
             options.max_grad_norm ? std::to_string(*options.max_grad_norm) : "never");
  record.set("--shuffle", std::string{options.shuffle ? "on" : "off"});
  record.set("--seed", options.seed);
  return record;
}

}  // namespace block_streamer_cli
