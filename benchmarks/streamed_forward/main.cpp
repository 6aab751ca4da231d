// SPDX-License-Identifier: Apache-2.0
#include "../support/main.hpp"
#include "../support/checkpointed_step.hpp"

#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/models/resident_weights.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace block_streamer_benchmarks;
namespace bs = block_streamer;

struct Options {
  explicit Options(Arguments& arguments)
      : model{arguments.text("--model", default_model())},
        tokens{static_cast<std::int64_t>(arguments.number("--tokens", 512))},
        rounds{std::max<std::size_t>(arguments.number("--rounds", 7), 1)} {}
  static std::string default_model() {
    const char* set = std::getenv("BLOCK_STREAMER_SMOLLM2");
    return set != nullptr && *set != '\0' ? set : "models/SmolLM2-135M-Instruct";
  }
  std::string model;
  std::int64_t tokens;
  std::size_t rounds;
};

/// The model in one type: resident, and streamed from its file in the page cache.
class Comparison {
 public:
  using Block = bs::models::DecoderBlock;
  using Streamer = bs::Streamer<Block, bs::FileStorage, bs::ExternalOptimizer, bs::HostBackend>;

  Comparison(const Options& options, bs::DType dtype)
      : options_{options},
        name_{bs::name_of(dtype)},
        model_{bs::Checkpoint::open(options.model), {dtype, at::Device{at::kCPU}}},
        blocks_{model_.blocks()},
        weights_{bs::models::resident_weights(model_)},
        streamer_{blocks_, bs::FileStorage{model_.block_map()}, bs::HostBackend{},
                  streamer_options(dtype)},
        context_{model_.context(1, options.tokens)} {
    const auto vocabulary = static_cast<std::int64_t>(model_.config().vocabulary_size);
    const c10::NoGradGuard no_grad;
    input_ = model_.embed(at::randint(0, vocabulary, {1, options.tokens},
                                      at::detail::createCPUGenerator(1),
                                      at::TensorOptions{}.dtype(at::kLong)));  // (1,T,C)
  }

  void forward(benchmark::State& state, Report& report) {
    const c10::NoGradGuard no_grad;
    streamer_.eval();
    compare(
        state, report, "forward",
        [&] { (void)bs::resident_forward<Block>(blocks_, weights_, input_, context_); },
        [&] { (void)streamer_.forward(input_, context_); }, at_most(1.10));
  }

  void lora_step(benchmark::State& state, Report& report) {
    std::vector<bs::LoraBlock> listed;
    for (std::size_t i = 0; i < blocks_.size(); ++i)
      listed.push_back({model_.layout().blocks[i].prefix, blocks_[i].weight_specs()});
    const bs::LoraAdapter adapter = bs::make_lora_adapter(listed, {}, at::Device{at::kCPU});
    const bs::AdapterTable table = adapter.table(listed);
    streamer_.attach(adapter.table(listed));
    streamer_.train();
    const auto loss = [](const at::Tensor& output) {
      return output.to(at::kFloat).square().mean();
    };
    const auto fresh = [&] {
      for (const at::Tensor& p : adapter.parameters()) p.mutable_grad() = at::Tensor{};
    };
    const auto streamed = [&] {
      fresh();
      loss(streamer_.forward(input_, context_)).backward();
    };
    compare(
        state, report, "LoRA step / resident that recomputes too",
        [&] {
          fresh();
          checkpointed_step<Block>(blocks_, weights_, input_, context_, table, loss);
        },
        streamed, at_most(1.10));
    compare(
        state, report, "LoRA step / resident that keeps all activations",
        [&] {
          fresh();
          loss(bs::resident_forward<Block>(blocks_, weights_, input_, context_, &table, true))
              .backward();
        },
        streamed, std::nullopt);
    streamer_.attach(bs::AdapterTable{});
  }

 private:
  using Clock = std::chrono::steady_clock;

  static bs::StreamerOptions streamer_options(bs::DType dtype) {
    bs::StreamerOptions options;
    options.prefetch_ahead = 1;
    options.dtype = dtype;
    return options;
  }
  /// Runs of one kind: how long each took, and how much of all processors.
  struct Runs {
    std::vector<double> wall_s, processor_s;
    template <class Work>
    void add(Work&& work) {
      const auto begin = Clock::now();
      const std::clock_t before = std::clock();
      work();
      processor_s.push_back(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC);
      wall_s.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
  };
  template <class Resident, class Streamed>
  void compare(benchmark::State& state, Report& report, const std::string& what,
               Resident&& resident, Streamed&& streamed, std::optional<Bar> bar) {
    resident();
    streamed();
    Runs limits, runs;
    for (std::size_t i = 0; i < options_.rounds; ++i) {
      limits.add(resident);
      runs.add(streamed);
    }
    const double limit = median(limits.wall_s), time = median(runs.wall_s);
    state.SetIterationTime(time);
    char note[64];
    std::snprintf(note, sizeof note, "processor time %.3f s, ratio %.4f", median(runs.processor_s),
                  median(runs.processor_s) / median(limits.processor_s));
    report.add(state, {name_ + " " + what, time * 1e3, "ms", limit * 1e3, time / limit, bar, note});
  }

  Options options_;
  std::string name_;
  bs::models::DecoderModel model_;
  std::vector<Block> blocks_;
  std::vector<std::vector<at::Tensor>> weights_;
  Streamer streamer_;
  bs::models::DecoderContext context_;
  at::Tensor input_;
};

int run(int argc, char** argv) {
  Arguments arguments{argc, argv};
  const Options options{arguments};
  if (!initialize_benchmark(arguments)) return 2;
  if (!std::filesystem::exists(std::filesystem::path{options.model} / "config.json")) {
    std::printf("skipped: no model in %s (examples/prepare_smollm2.py makes it)\n",
                options.model.c_str());
    return 0;
  }
  std::printf("%s, %lld tokens, %d threads\n", options.model.c_str(),
              static_cast<long long>(options.tokens), at::get_num_threads());
  Report report;
  for (const bs::DType dtype : {bs::DType::f32, bs::DType::bf16}) {
    const std::string name{bs::name_of(dtype)};
    register_once(report, "page_cache/forward/" + name, [&, dtype](benchmark::State& state) {
      Comparison{options, dtype}.forward(state, report);
    });
    register_once(report, "page_cache/lora_step/" + name, [&, dtype](benchmark::State& state) {
      Comparison{options, dtype}.lora_step(state, report);
    });
  }
  benchmark::RunSpecifiedBenchmarks();
  report.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return block_streamer_benchmarks::guarded_main([&] { return run(argc, argv); });
}
