// SPDX-License-Identifier: Apache-2.0
// The scenarios, for any device. @see HostSide, CudaSide
#pragma once

#include "../support/decoder_session.hpp"
#include "../support/random_head.hpp"
#include "../support/report.hpp"
#include "decode_options.hpp"

#include <block_streamer/layers/kv_cache.hpp>
#include <block_streamer/models/decoder_context.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/randint.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace block_streamer_benchmarks {

/// @brief Greedy decoding with a KV cache, one token of each sequence a pass: each token is on the
/// host before the next pass begins, as a program that looks for the end of the text needs it.
template <class Side>
class DecodeBenchmark {
 public:
  using Streamer = typename DecoderSession<Side>::Streamer;

  DecodeBenchmark(Side& side, const DecodeOptions& options, Report& report)
      : side_{side},
        options_{options},
        report_{report},
        session_{side, {options.shape, options.layers, {}}} {}

  void register_all() {
    const std::size_t half = decoder_.config().layer_count / 2;
    register_once(report_, "decode/1/2_slots", [this](auto& state) { link_share(state); });
    register_once(report_, "decode/1/half_cached", [=, this](auto& state) {
      gain(state, {1, half}, "half of the blocks cached / none", 1.9);
    });
    register_once(report_, "decode/" + std::to_string(options_.batch), [this](auto& state) {
      gain(state, {options_.batch, 0}, std::to_string(options_.batch) + " sequences a pass / one",
           7.5 / 8 * static_cast<double>(options_.batch));
    });
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Setting {
    std::int64_t batch = 1;
    std::size_t cached = 0;
    friend auto operator<=>(const Setting&, const Setting&) = default;
  };
  struct Measured {
    double tokens_per_s = 0;  ///< median, of all sequences together
    double link_bytes_per_s = 0;
    double bytes_a_pass = 0;
  };

  /// The model's ends: a head that is the embedding as well.
  void make_ends() {
    if (head_) return;
    const bs::ModelConfig& config = decoder_.config();
    head_.emplace(options_.vocabulary, static_cast<std::int64_t>(config.hidden_size),
                  config.rms_norm_eps, side_.device());
    frequencies_ = bs::models::rotary_frequencies_of(config).to(side_.device());
  }
  [[nodiscard]] bs::KvCache make_cache(const Setting& setting) {
    const bs::ModelConfig& config = decoder_.config();
    const auto room =
        options_.context + static_cast<std::int64_t>(options_.tokens * (options_.rounds + 2));
    return bs::KvCache{{static_cast<std::int64_t>(config.layer_count), setting.batch,
                        static_cast<std::int64_t>(config.kv_head_count), room,
                        static_cast<std::int64_t>(config.head_dim)},
                       at::kBFloat16,
                       side_.device()};
  }

  /// One pass. ids: (B,T) on the host; returns (B,1), on the host.
  [[nodiscard]] at::Tensor next(Streamer& streamer, const at::Tensor& ids, bs::KvCache& cache) {
    bs::models::DecoderContext context = bs::models::make_context(
        ids.size(0), ids.size(1), frequencies_, at::kBFloat16, {.cache = &cache});
    const at::Tensor hidden =
        streamer.forward(at::embedding(head_->weight, ids.to(side_.device())), context);
    const at::Tensor last = hidden.narrow(1, hidden.size(1) - 1, 1);  // (B,1,C)
    return at::argmax(head_->logits(last), -1).cpu();
  }

  [[nodiscard]] const Measured& measured(const Setting& setting) {
    const auto known = results_.find(setting);
    if (known != results_.end()) return known->second;
    const c10::NoGradGuard no_grad;
    make_ends();
    Streamer& s = session_.streamer(setting.cached);
    bs::KvCache cache = make_cache(setting);
    at::Tensor ids = next(
        s, at::randint(options_.vocabulary, {setting.batch, options_.context}, at::kLong), cache);
    for (std::size_t i = 0; i < options_.tokens; ++i) ids = next(s, ids, cache);  // warm
    std::vector<double> rates, links;
    Measured result;
    for (std::size_t round = 0; round < options_.rounds; ++round) {
      s.drain();
      links.push_back(decoder_.link_rate());
      s.reset_stats();
      const auto begin = Clock::now();
      for (std::size_t i = 0; i < options_.tokens; ++i) ids = next(s, ids, cache);
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      rates.push_back(static_cast<double>(options_.tokens) * static_cast<double>(setting.batch) /
                      seconds);
      s.drain();
      result.bytes_a_pass =
          static_cast<double>(s.statistics().bytes_copied) / static_cast<double>(options_.tokens);
    }
    result.tokens_per_s = median(rates);
    result.link_bytes_per_s = median(links);
    return results_[setting] = result;
  }

  void link_share(benchmark::State& state) {
    const Measured& m = measured({1, 0});
    const double limit = m.link_bytes_per_s / m.bytes_a_pass;
    finish(state, m);
    char note[80];
    std::snprintf(note, sizeof note, "%.3f GB a token, link %.1f GB/s", m.bytes_a_pass / 1e9,
                  m.link_bytes_per_s / 1e9);
    report_.add(state, {"decode, 2 slots / (link / streamed bytes)", m.tokens_per_s, "tok/s", limit,
                        m.tokens_per_s / limit, bar(0.97), note});
  }
  void gain(benchmark::State& state, const Setting& setting, const std::string& what,
            double least) {
    const double one = measured({1, 0}).tokens_per_s;
    const Measured& m = measured(setting);
    finish(state, m);
    char note[80];
    std::snprintf(note, sizeof note, "%.3f GB a pass", m.bytes_a_pass / 1e9);
    report_.add(state,
                {what, m.tokens_per_s, "tok/s", one, m.tokens_per_s / one, bar(least), note});
  }
  static void finish(benchmark::State& state, const Measured& m) {
    state.SetIterationTime(1 / m.tokens_per_s);
    state.counters["tokens_per_s"] = m.tokens_per_s;
    state.counters["link_GB_per_s"] = m.link_bytes_per_s / 1e9;
    state.counters["GB_a_pass"] = m.bytes_a_pass / 1e9;
  }
  [[nodiscard]] static std::optional<Bar> bar(double least) {
    return Side::is_device ? std::optional{at_least(least)} : std::nullopt;
  }

  Side& side_;
  DecodeOptions options_;
  Report& report_;
  DecoderSession<Side> session_;
  RandomDecoder<Side>& decoder_ = session_.decoder();
  std::optional<RandomHead> head_;
  at::Tensor frequencies_;
  std::map<Setting, Measured> results_;
};

/// @brief Registers the scenarios and runs what the command line selects.
template <class Side>
void run_decode(Side& side, const DecodeOptions& options, Report& report) {
  DecodeBenchmark<Side> scenarios{side, options, report};
  scenarios.register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::ClearRegisteredBenchmarks();
}

}  // namespace block_streamer_benchmarks
