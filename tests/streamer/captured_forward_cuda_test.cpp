// SPDX-License-Identifier: Apache-2.0
// Forwards recorded in CUDA graphs and replayed. Skips, saying why, where there is no device.
#include "cuda_values.hpp"
#include "toy_model.hpp"

#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/block/device_graph_cuda.hpp>
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/counting_backend.hpp>
#include <block_streamer/models/decoder_model.hpp>

#include <ATen/cuda/Sleep.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <support/catch.hpp>
#include <support/cuda.hpp>

#include <string>
#include <utility>
#include <vector>

namespace bs = block_streamer;
using support::check_refused;
using support::cuda;
using support::input_of;
using support::same;
using support::ToyContext;
using support::ToyModel;
using CudaStreamer = support::ToyStreamer<bs::CudaBackend>;

namespace {

std::uint64_t all_bytes(const CudaStreamer& streamer) {
  return streamer.block_count() * streamer.shape().slot_byte_count;
}

/// Counts spans of copies and visits.
struct DeviceSpanCount {
  std::size_t count = 0;
  [[nodiscard]] bool enabled() const noexcept { return true; }
  void record(const bs::TraceEvent& event) noexcept {
    count += event.name == "copy" || event.name == "compute" ? 1 : 0;
  }
};

}  // namespace

TEST_CASE("captured: replays give the bits of streamed forwards, whatever the input") {
  if (!support::cuda_usable()) return;
  std::size_t combinations = 0;
  for (const bs::DType dtype : {bs::DType::f32, bs::DType::bf16, bs::DType::f16}) {
    const ToyModel model{dtype};
    for (const bool converted : {false, true}) {
      for (std::uint32_t ahead = 0; ahead <= 5; ++ahead) {
        for (const double share : {0.0, 0.3, 0.7, 1.0}) {
          auto options = support::toy_options(ahead);
          const bs::DType computed = converted ? bs::DType::f32 : dtype;
          if (converted) options.dtype = computed;
          CudaStreamer plain{model.blocks(), model.storage("ram"), bs::CudaBackend{0}, options};
          options.device_budget =
              static_cast<std::uint64_t>(static_cast<double>(all_bytes(plain)) * share);
          CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0}, options};
          auto captured = streamer.capture();
          ToyContext context;
          bool equal = true;
          for (std::int64_t i = 0; i < 4; ++i) {
            const at::Tensor x = input_of(5, i, bs::scalar_type_of(computed));
            const at::Tensor expected = plain.forward(x, context);
            equal = equal && same(captured.forward(x), expected);
            // Streamed forwards in between take the slots, and find them usable.
            if (i == 1) equal = equal && same(streamer.forward(x, context), expected);
          }
          INFO("ahead " << ahead << " share " << share << " " << bs::name_of(dtype) << " "
                        << converted);
          CHECK(equal);
          CHECK(captured.recorded_count() == 1);
          ++combinations;
        }
      }
    }
  }
  WARN(combinations << " combinations");
}

TEST_CASE("captured: statistics and history see the passes that replays do") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                        support::toy_options()};
  const at::Tensor x = input_of(5, 1);
  auto captured = streamer.capture();
  auto& pass = captured.pass(x);
  streamer.drain();
  streamer.reset_stats();
  for (int i = 0; i < 3; ++i) pass.replay();
  const bs::Statistics statistics = streamer.statistics();
  CHECK(statistics.passes == 3);
  CHECK(statistics.visits == 18);
  CHECK(statistics.fetches == 18);
  std::uint64_t bytes = 0;
  const bs::AnyStorage storage = model.storage("ram");
  for (std::size_t b = 0; b < storage.block_count(); ++b) {
    for (const auto& tensor : storage.image(bs::block_at(b)).layout.tensors)
      bytes += tensor.byte_count;
  }
  CHECK(statistics.bytes_copied >= 3 * bytes);
  CHECK(statistics.bytes_copied == statistics.bytes_needed);
  CHECK(statistics.peak_resident_blocks == 2);
  CHECK(streamer.history().back().to == bs::Residency::released);
}

TEST_CASE("captured: a budget keeps blocks, and replays copy only the others") {
  if (!support::cuda_usable()) return;
  const ToyModel model{bs::DType::f32, {64, 64, 64, 64, 64, 64, 64, 64}};
  auto options = support::toy_options();
  CudaStreamer plain{model.blocks(), model.storage("ram"), bs::CudaBackend{0}, options};
  options.device_budget = 4 * plain.shape().slot_byte_count;
  CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0}, options};
  auto captured = streamer.capture();
  ToyContext context;
  const at::Tensor x = input_of(5, 1);
  const at::Tensor expected = plain.forward(x, context);
  auto& pass = captured.pass(x);
  pass.load(x);
  pass.replay();
  streamer.reset_stats();
  pass.replay();
  CHECK(streamer.statistics().fetches == 4);
  CHECK(same(pass.output(), expected));
  // A streamed pass takes other slots: what is kept is brought back.
  for (int i = 0; i < 3; ++i) (void)streamer.forward(x, context);
  streamer.reset_stats();
  pass.replay();
  CHECK(same(pass.output(), expected));
  CHECK(streamer.statistics().passes == 1);
  CHECK(streamer.statistics().fetches >= 4);
}

TEST_CASE("captured: values of adapters change in place; other adapters are recorded anew") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  const auto adapter = model.adapter(1, 0, cuda), other = model.adapter(0.5, 0, cuda);
  CudaStreamer plain{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                     support::toy_options()};
  CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                        support::toy_options()};
  ToyContext context;
  for (auto* s : {&plain, &streamer}) s->attach(adapter.table(model.lora_blocks()));
  auto captured = streamer.capture();
  const at::Tensor x = input_of(5, 1);
  const at::Tensor first = captured.forward(x);
  CHECK_FALSE(first.requires_grad());
  for (int step = 0; step < 3; ++step) {
    {
      const c10::NoGradGuard no_grad;
      for (const at::Tensor& p : adapter.parameters()) at::Tensor{p}.add_(0.125);
    }
    const at::Tensor now = captured.forward(x);
    CHECK(same(now, plain.forward(x, context).detach()));
    CHECK_FALSE(same(now, first));
  }
  CHECK(captured.recorded_count() == 1);
  auto& stale = captured.pass(x);
  for (auto* s : {&plain, &streamer}) s->attach(other.table(model.lora_blocks()));
  CHECK_THROWS_AS(stale.replay(), bs::ContractViolation);
  CHECK(same(captured.forward(x), plain.forward(x, context).detach()));
  CHECK(captured.recorded_count() == 2);
}

TEST_CASE("captured: each shape and type is recorded once, the latest four are kept") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                        support::toy_options()};
  auto captured = streamer.capture();
  ToyContext context;
  const auto check = [&](const at::Tensor& x, std::size_t recorded) {
    CHECK(same(captured.forward(x), streamer.forward(x, context)));
    CHECK(captured.recorded_count() == recorded);
  };
  for (std::int64_t rows = 1; rows <= 4; ++rows)
    check(input_of(rows, rows), static_cast<std::size_t>(rows));
  for (std::int64_t rows = 1; rows <= 4; ++rows) check(input_of(rows, 9), 4);
  check(input_of(5, 1), 5);  // in the place of one row
  check(input_of(2, 1), 5);
  check(input_of(1, 1), 6);
  const at::Tensor turned = input_of(support::toy_width, 3).t();  // as large, other strides
  check(turned, 7);
  check(turned.contiguous(), 8);
  check(input_of(1, 2).expand({7, support::toy_width}), 9);  // a clone is dense
  CHECK_THROWS_AS(captured.forward(input_of(2, 1, at::kDouble)), bs::ContractViolation);
  {
    const c10::InferenceMode inference;
    check(input_of(8, 1), 10);
  }
  check(input_of(8, 2), 10);
}

TEST_CASE("captured: what cannot be recorded is refused with its reason, and nothing is lost") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  for (const std::string tier : {"mapped", "file"}) {
    CudaStreamer streamer{model.blocks(), model.storage(tier), bs::CudaBackend{0},
                          support::toy_options()};
    check_refused<bs::UnsupportedError>([&] { (void)streamer.capture(); },
                                        "a graph cannot wait for reads");
  }
  enum class Fault { item, nonzero, swallowed, synchronize, thrown };
  for (const Fault fault :
       {Fault::item, Fault::nonzero, Fault::swallowed, Fault::synchronize, Fault::thrown}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{3}, std::size_t{5}}) {
      CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                            support::toy_options()};
      const at::Tensor x = input_of(5, 1);
      int calls = 0;
      bool faulty = true;
      ToyContext context;
      context.before_block = [&, at, fault](std::size_t block) {
        if (block != at || !faulty) return;
        ++calls;
        switch (fault) {
          case Fault::item:
            (void)x.sum().item<float>();
            return;
          case Fault::nonzero:
            (void)at::nonzero(x);
            return;
          case Fault::swallowed:
            try {
              (void)x.sum().item<float>();
            } catch (const std::exception&) {
            }
            return;
          case Fault::synchronize:
            c10::cuda::getCurrentCUDAStream().synchronize();
            return;
          case Fault::thrown:
            if (calls > 1) throw std::runtime_error{"the block had enough"};
        }
      };
      ToyContext plain;
      const at::Tensor expected = streamer.forward(x, plain);
      auto captured = streamer.capture(context);
      const std::string name = "block " + std::to_string(at) + " cannot be recorded";
      INFO("fault " << static_cast<int>(fault) << " in block " << at);
      check_refused<bs::UnsupportedError>([&] { (void)captured.forward(x); }, name);
      CHECK(captured.recorded_count() == 0);
      calls = 0;
      CHECK(same(streamer.forward(x, plain), expected));
      check_refused<bs::UnsupportedError>([&] { (void)captured.forward(x); }, name);
      CHECK_NOTHROW(at::rand({3}, x.options()).sum().item<float>());  // random numbers go on
      CHECK(same(streamer.capture(plain).forward(x), expected));
      faulty = false;
      CHECK(same(captured.forward(x), expected));
    }
  }
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("captured: a recording that failed gives its memory back") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                        support::toy_options()};
  ToyContext context;
  at::Tensor large;
  context.before_block = [&](std::size_t block) {
    large = at::rand({1 << 20}, at::TensorOptions{}.device(cuda));
    if (block == 4) (void)large.sum().item<float>();
  };
  const at::Tensor x = input_of(5, 1);
  const auto reserved = [&] {
    c10::cuda::CUDACachingAllocator::emptyCache();
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).reserved_bytes[0].current;
  };
  auto captured = streamer.capture(context);
  CHECK_THROWS_AS(captured.forward(x), bs::UnsupportedError);
  large = at::Tensor{};
  const auto first = reserved();
  for (int i = 0; i < 5; ++i) {
    CHECK_THROWS_AS(captured.forward(x), bs::UnsupportedError);
    large = at::Tensor{};
  }
  CHECK(reserved() <= first);
}

TEST_CASE("captured: random numbers go on from replay to replay") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                        support::toy_options()};
  ToyContext context;
  context.dropout = 0.5;
  auto captured = streamer.capture(context);
  const at::Tensor x = input_of(5, 1);
  at::Generator generator = at::globalContext().defaultGenerator(cuda);
  const at::Tensor first = captured.forward(x), second = captured.forward(x);
  CHECK_FALSE(same(first, second));
  generator.set_current_seed(7);
  const at::Tensor seeded = captured.forward(x);
  generator.set_current_seed(7);
  CHECK(same(captured.forward(x), seeded));
  generator.set_current_seed(7);
  CHECK(same(streamer.forward(x, context), seeded));
}

TEST_CASE("captured: closing and converting make new recordings; a pass outlives its streamer") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  ToyContext context;
  const at::Tensor x = input_of(5, 1);
  auto streamer = std::make_unique<CudaStreamer>(model.blocks(), model.storage("ram"),
                                                 bs::CudaBackend{0}, support::toy_options());
  const at::Tensor expected = streamer->forward(x, context);
  auto captured = streamer->capture();
  CHECK(same(captured.forward(x), expected));
  auto& pass = captured.pass(x);
  streamer->close();
  CHECK_FALSE(pass.is_current());
  CHECK_THROWS_AS(pass.replay(), bs::ContractViolation);
  CHECK(same(captured.forward(x), expected));
  CHECK(captured.recorded_count() == 2);
  streamer->to(bs::DType::bf16);
  const at::Tensor half = x.to(at::kBFloat16);
  CHECK(same(captured.forward(half), streamer->forward(half, context)));
  streamer->to(bs::DType::f32);
  CHECK(same(captured.forward(x), expected));
  streamer.reset();
  CHECK(same(captured.forward(x), expected));
}

TEST_CASE("captured: slow kernels and a stream that changes between replays") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                        support::toy_options()};
  ToyContext slow, plain;
  slow.before_block = [](std::size_t) { at::cuda::sleep(1'000'000); };
  auto captured = streamer.capture(slow);
  std::vector<at::Tensor> inputs, expected;
  for (std::int64_t i = 0; i < 20; ++i) {
    inputs.push_back(input_of(5, i));
    expected.push_back(streamer.forward(inputs.back(), plain));
  }
  c10::cuda::device_synchronize();
  std::vector<at::Tensor> results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {  // nothing waits in between
    const auto stream = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStreamGuard guard{stream};
    results.push_back(i % 3 == 2 ? streamer.forward(inputs[i], slow) : captured.forward(inputs[i]));
  }
  c10::cuda::device_synchronize();
  for (std::size_t i = 0; i < inputs.size(); ++i) CHECK(same(results[i], expected[i]));
}

TEST_CASE("captured: the vector clocks find every access of a recorded pass ordered") {
  if (!support::cuda_usable()) return;
  using Backend = bs::CheckedBackend<bs::CudaBackend>;
  const ToyModel model;
  for (const double share : {0.0, 0.5}) {
    Backend backend{bs::CudaBackend{0}};
    const bs::ViolationLog log = backend.log();
    {
      auto options = support::toy_options();
      options.device_budget = static_cast<std::uint64_t>(share * 6 * 20000);
      support::ToyStreamer<Backend> streamer{model.blocks(), model.storage("ram"), backend,
                                             options};
      ToyContext context;
      auto captured = streamer.capture();
      for (std::int64_t i = 0; i < 4; ++i) {
        const at::Tensor x = input_of(5, i);
        CHECK(same(captured.forward(x), streamer.forward(x, context)));
      }
    }
    INFO(to_string(log));
    CHECK(log.empty());
  }
}

TEST_CASE("captured: a replay makes no synchronising call and allocates nothing") {
  if (!support::cuda_usable()) return;
  using Backend = bs::CountingBackend<bs::CudaBackend>;
  const ToyModel model;
  Backend backend{bs::CudaBackend{0}};
  support::ToyStreamer<Backend> streamer{model.blocks(), model.storage("ram"), backend,
                                         support::toy_options()};
  auto captured = streamer.capture();
  auto& pass = captured.pass(input_of(5, 1));
  pass.replay();
  const auto calls = [&] {
    return backend.counts().synchronizes.load() + backend.counts().queries.load() +
           backend.counts().notifies.load() + backend.counts().allocations.load();
  };
  const auto before = calls();
  for (int i = 0; i < 5; ++i) pass.replay();
  CHECK(calls() == before);
  streamer.drain();
}

TEST_CASE("captured: a decoder takes each pass's own context; a KV cache is refused") {
  if (!support::cuda_usable()) return;
  using Block = bs::models::DecoderBlock;
  bs::ModelConfig config;
  config.path = "tiny";
  config.model_type = "qwen3";
  config.head_dim = 32;
  config.rms_norm_eps = 1e-6;
  config.rope.type = "default";
  config.rope.theta = 1e4;
  config.max_position = 4096;
  config.hidden_size = 64;
  config.intermediate_size = 160;
  config.head_count = 4;
  config.kv_head_count = 2;
  config.layer_count = 5;
  bs::BlockLayout layout;
  std::uint64_t end = 0;
  for (const bs::ExpectedTensor& tensor : bs::decoder_block_tensors(config)) {
    const std::uint64_t begin = bs::round_up(end, bs::tensor_alignment);
    const std::uint64_t bytes = bs::dense_byte_count(bs::DType::bf16, tensor.shape).value();
    layout.tensors.push_back({{tensor.name, bs::DType::bf16, tensor.shape}, 0, begin, bytes});
    end = begin + bytes;
  }
  layout.slot_byte_count = {end};
  bs::RamStorage storage{std::vector<bs::BlockLayout>(config.layer_count, layout)};
  std::vector<Block> blocks;
  std::vector<bs::LoraBlock> lora_blocks;
  auto generator = at::detail::createCPUGenerator(3);
  for (std::size_t b = 0; b < config.layer_count; ++b) {
    blocks.emplace_back(config, b);
    lora_blocks.push_back({bs::decoder_block_prefix(b), blocks.back().weight_specs()});
    for (const bs::TensorPlacement& tensor : layout.tensors) {
      at::Tensor to = bs::view_of(storage.writable_bytes(bs::block_at(b), tensor), tensor.spec,
                                  at::Device{at::kCPU});
      to.copy_(at::randn(to.sizes(), generator) * 0.1);
    }
  }
  bs::Streamer streamer{std::move(blocks),
                        std::move(storage),
                        bs::CudaBackend{0},
                        {.prefetch_ahead = 1, .device_budget = 2 * end}};
  bs::LoraOptions lora;
  lora.rank = 4;
  auto adapter = bs::make_lora_adapter(lora_blocks, lora, cuda);
  streamer.attach(adapter.table(lora_blocks));
  auto captured = streamer.capture();
  const at::Tensor frequencies = bs::models::rotary_frequencies_of(config).to(cuda);
  const auto check = [&](std::int64_t rows, std::int64_t tokens,
                         std::vector<std::int64_t> padding = {}) {
    const c10::NoGradGuard no_grad;
    const at::Tensor x =
        at::randn({rows, tokens, 64}, at::TensorOptions{}.dtype(at::kBFloat16).device(cuda));
    bs::models::ContextOptions options;
    options.left_padding = padding;
    auto context = bs::models::make_context(rows, tokens, frequencies, at::kBFloat16, options);
    auto again = context;
    CHECK(same(captured.forward(x, context), streamer.forward(x, again)));
  };
  for (int i = 0; i < 3; ++i) {
    check(2, 33);
    for (const at::Tensor& p : adapter.parameters()) {
      const c10::NoGradGuard no_grad;
      at::Tensor{p}.add_(0.01);
    }
  }
  CHECK(captured.recorded_count() == 1);
  check(2, 33, {3, 0});  // a mask
  check(2, 33, {0, 7});
  check(2, 33);
  CHECK(captured.recorded_count() == 2);
  check(1, 1100);  // products of many rows
  check(1, 1100);
  check(1, 1);
  CHECK(captured.recorded_count() == 4);
  bs::KvCache cache{{5, 1, 2, 64, 32}, at::kBFloat16, cuda};
  auto context = bs::models::make_context(1, 3, frequencies, at::kBFloat16, {.cache = &cache});
  const at::Tensor x = at::randn({1, 3, 64}, at::TensorOptions{}.dtype(at::kBFloat16).device(cuda));
  check_refused<bs::UnsupportedError>([&] { (void)captured.forward(x, context); }, "KV cache");
}

TEST_CASE("captured: somebody who listens to the timeline hears nothing of what is only recorded") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  DeviceSpanCount spans;
  auto options = support::toy_options();
  options.trace = spans;
  CudaStreamer streamer{model.blocks(), model.storage("ram"), bs::CudaBackend{0}, options};
  ToyContext context;
  const at::Tensor x = input_of(5, 1);
  const at::Tensor expected = streamer.forward(x, context);
  streamer.drain();
  const std::size_t of_a_pass = spans.count;
  auto captured = streamer.capture();
  CHECK(same(captured.forward(x), expected));
  streamer.drain();
  CHECK(spans.count <= 3 * of_a_pass);  // the pass before the recording, and what is kept
  const std::size_t recorded = spans.count;
  CHECK(same(captured.forward(x), expected));
  streamer.drain();
  CHECK(spans.count == recorded);
  CHECK(same(streamer.forward(x, context), expected));
  streamer.drain();
  CHECK(spans.count > recorded);
}

TEST_CASE("captured: as the documents show it") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  auto blocks = model.blocks();
  auto storage = bs::RamStorage::load(model.map());
  const at::Tensor x = input_of(5, 1), x2 = input_of(5, 2), x3 = input_of(5, 3);
  // [use]
  bs::Streamer streamer{
      std::move(blocks), std::move(storage), bs::CudaBackend{0}, {.prefetch_ahead = 1}};
  auto captured = streamer.capture();
  at::Tensor y = captured.forward(x);   // runs the list once, records it, replays it
  at::Tensor z = captured.forward(x2);  // of the same shape: replays it

  auto& pass = captured.pass(x);  // without copies of input and result, on one stream
  pass.input().copy_(x3);
  pass.replay();
  at::Tensor w = pass.output() + 1;  // the output is there until the next replay
  // [/use]
  ToyContext context;
  CHECK(same(y, streamer.forward(x, context)));
  CHECK(same(z, streamer.forward(x2, context)));
  CHECK(same(w, streamer.forward(x3, context) + 1));
}
