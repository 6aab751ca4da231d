// SPDX-License-Identifier: Apache-2.0
// Training steps recorded in CUDA graphs and replayed. Skips, saying why, where there is no device.
#include "cuda_values.hpp"
#include "toy_model.hpp"

#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/block/device_graph_cuda.hpp>
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/counting_backend.hpp>
#include <block_streamer/layers/rms_norm.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/train/chunked_loss.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <span>
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

at::Tensor distance(const at::Tensor& output, std::span<const at::Tensor> targets) {
  return at::mse_loss(output.to(at::kFloat), targets[0]);
}

/// A streamer whose adapter trains, with AdamW outside of it.
template <class Backend = bs::CudaBackend>
struct Trained {
  bs::LoraAdapter adapter;
  support::ToyStreamer<Backend> streamer;
  std::vector<at::Tensor> parameters;
  bs::AdamW adamw{};
  std::uint64_t steps = 0;

  Trained(const ToyModel& model, const bs::StreamerOptions& options, double top = 1,
          double dropout = 0, Backend backend = Backend{bs::CudaBackend{0}})
      : adapter{model.adapter(top, dropout, cuda)},
        streamer{model.blocks(), model.storage("ram"), std::move(backend), options} {
    streamer.attach(adapter.table(model.lora_blocks()));
    streamer.train();
    parameters = streamer.parameters();
  }

  void forget() {
    for (const at::Tensor& p : parameters) p.mutable_grad() = at::Tensor{};
  }
  at::Tensor plain(const at::Tensor& x, const at::Tensor& y, ToyContext& context) {
    const at::Tensor loss = distance(streamer.forward(x, context), std::array{y});
    loss.backward();
    return loss.detach();
  }
  void optimize() { adamw.step(parameters, {.step = ++steps, .learning_rate = 0.02}); }
};

bool same_gradients(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  return std::ranges::equal(some, others, [](const at::Tensor& a, const at::Tensor& b) {
    return same(a.grad(), b.grad());
  });
}
bool same_values(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  return std::ranges::equal(some, others, [](const at::Tensor& a, const at::Tensor& b) {
    return same(a.detach(), b.detach());
  });
}

bs::StreamerOptions options_with(std::uint32_t ahead, double share, const ToyModel& model) {
  auto options = support::toy_options(ahead);
  const CudaStreamer plain{model.blocks(), model.storage("ram"), bs::CudaBackend{0}, options};
  const auto all = plain.block_count() * plain.shape().slot_byte_count;
  options.device_budget = static_cast<std::uint64_t>(static_cast<double>(all) * share);
  return options;
}

/// Trains both for `steps`; @returns in how many steps something differed, the weights at the end
/// included.
template <class Captured, class A, class B>
int differences(Captured& captured, A& recorded, B& plain, int steps, ToyContext& context,
                at::ScalarType dtype = at::kFloat) {
  int wrong = 0;
  for (std::int64_t s = 0; s < steps; ++s) {
    const at::Tensor x = input_of(5, s, dtype), y = input_of(5, 100 + s);
    recorded.forget();
    plain.forget();
    const at::Tensor expected = plain.plain(x, y, context);
    // A streamed step in between takes the slots, and finds them usable.
    const at::Tensor loss = s % 7 == 5 ? recorded.plain(x, y, context) : captured.run(x, {y});
    wrong += same(loss, expected) && same_gradients(recorded.parameters, plain.parameters) ? 0 : 1;
    recorded.optimize();
    plain.optimize();
  }
  return wrong + (same_values(recorded.parameters, plain.parameters) ? 0 : 1);
}

}  // namespace

TEST_CASE("captured step: loss, gradients and trained weights are those of streamed steps") {
  if (!support::cuda_usable()) return;
  std::size_t combinations = 0;
  for (const bs::DType dtype : {bs::DType::f32, bs::DType::bf16}) {
    const ToyModel model{dtype};
    for (const bool converted : {false, true}) {
      for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
        for (const double share : {0.0, 0.5, 1.0}) {
          auto options = options_with(ahead, share, model);
          const bs::DType computed = converted ? bs::DType::f32 : dtype;
          if (converted) options.dtype = computed;
          auto unbudgeted = options;
          unbudgeted.device_budget = 0;
          Trained<> recorded{model, options}, plain{model, unbudgeted};
          auto captured = recorded.streamer.capture_step(distance);
          ToyContext context;
          const auto start = recorded.parameters[0].detach().clone();
          INFO("ahead " << ahead << " share " << share << " " << bs::name_of(dtype) << " "
                        << converted);
          CHECK(differences(captured, recorded, plain, 20, context, bs::scalar_type_of(computed)) ==
                0);
          CHECK(captured.recorded_count() == 1);
          CHECK_FALSE(same(start, recorded.parameters[0].detach()));
          ++combinations;
        }
      }
    }
  }
  WARN(combinations << " combinations");
}

TEST_CASE("captured step: dropout draws what a streamed step draws, again in the recompute") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  Trained<> recorded{model, support::toy_options(), 1, 0.25},
      plain{model, support::toy_options(), 1, 0.25};
  ToyContext context;
  context.dropout = 0.5;
  auto captured = recorded.streamer.capture_step(
      [](const at::Tensor& output, std::span<const at::Tensor> targets) {
        return distance(at::dropout(output, 0.3, true), targets);
      },
      context);
  at::Generator generator = at::globalContext().defaultGenerator(cuda);
  at::Tensor before;
  for (std::int64_t s = 0; s < 20; ++s) {
    const at::Tensor x = input_of(5, 1), y = input_of(5, 2);
    recorded.forget();
    plain.forget();
    const at::Tensor state = generator.get_state();
    const at::Tensor expected =
        distance(at::dropout(plain.streamer.forward(x, context), 0.3, true), std::array{y});
    expected.backward();
    const at::Tensor after = generator.get_state();
    generator.set_state(state);
    const at::Tensor loss = captured.run(x, {y});
    CHECK(same(loss, expected.detach()));
    CHECK(same_gradients(recorded.parameters, plain.parameters));
    CHECK(at::equal(generator.get_state(), after));
    if (before.defined()) CHECK_FALSE(same(loss, before));
    before = loss;
  }
}

TEST_CASE("captured step: an adapter of the upper blocks lets the backward end early") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  for (const double top : {0.2, 0.5, 0.8}) {
    for (const double share : {0.0, 0.5}) {
      const auto options = options_with(1, share, model);
      Trained<> recorded{model, options, top}, plain{model, options, top};
      auto captured = recorded.streamer.capture_step(distance);
      ToyContext context;
      INFO("top " << top << " share " << share);
      CHECK(differences(captured, recorded, plain, 8, context) == 0);
    }
  }
}

TEST_CASE("captured step: what a way leaves in the slots serves the next") {
  if (!support::cuda_usable()) return;
  const ToyModel model{bs::DType::f32, {64, 64, 64, 64, 64, 64, 64, 64}};
  for (const std::uint32_t slots : {2U, 3U, 5U, 8U}) {
    auto options = support::toy_options();
    const CudaStreamer sized{model.blocks(), model.storage("ram"), bs::CudaBackend{0}, options};
    options.device_budget = (slots - 2) * sized.shape().slot_byte_count;
    Trained<> recorded{model, options};
    REQUIRE(recorded.streamer.shape().slot_count == slots);
    auto captured = recorded.streamer.capture_step(distance);
    const at::Tensor x = input_of(5, 1), y = input_of(5, 2);
    (void)captured.run(x, {y});
    recorded.streamer.drain();
    recorded.streamer.reset_stats();
    for (int i = 0; i < 3; ++i) (void)captured.run(x, {y});
    const bs::Statistics statistics = recorded.streamer.statistics();
    INFO(slots << " slots");
    CHECK(statistics.passes == 3);
    CHECK(statistics.visits == 3 * 16);
    CHECK(statistics.fetches == 3 * 2 * (8 - slots));
    CHECK(statistics.bytes_copied == statistics.bytes_needed);
    CHECK(statistics.peak_resident_blocks == slots);
  }
}

TEST_CASE("captured step: .grad is treated as a backward treats it") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  Trained<> recorded{model, support::toy_options()}, plain{model, support::toy_options()};
  auto captured = recorded.streamer.capture_step(distance);
  ToyContext context;
  for (std::int64_t s = 0; s < 5; ++s) {  // nobody lets go of it
    const at::Tensor x = input_of(5, s), y = input_of(5, 9);
    (void)plain.plain(x, y, context);
    (void)captured.run(x, {y});
    CHECK(same_gradients(recorded.parameters, plain.parameters));
  }
  (void)captured.run(input_of(3, 1), {input_of(3, 2)});  // of another recording
  (void)plain.plain(input_of(3, 1), input_of(3, 2), context);
  CHECK(same_gradients(recorded.parameters, plain.parameters));
  for (const at::Tensor& p : recorded.parameters) p.grad().zero_();
  for (const at::Tensor& p : plain.parameters) p.grad().zero_();
  (void)plain.plain(input_of(5, 1), input_of(5, 9), context);
  (void)captured.run(input_of(5, 1), {input_of(5, 9)});
  CHECK(same_gradients(recorded.parameters, plain.parameters));
}

TEST_CASE("captured step: shapes, what trains, and adapters are recorded anew") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  Trained<> recorded{model, support::toy_options()}, plain{model, support::toy_options()};
  auto captured = recorded.streamer.capture_step(distance);
  ToyContext context;
  const auto check = [&](std::int64_t rows, std::size_t count) {
    recorded.forget();
    plain.forget();
    const at::Tensor x = input_of(rows, rows), y = input_of(rows, 50);
    CHECK(same(captured.run(x, {y}), plain.plain(x, y, context)));
    CHECK(same_gradients(recorded.parameters, plain.parameters));
    CHECK(captured.recorded_count() == count);
  };
  for (std::int64_t rows = 1; rows <= 4; ++rows) check(rows, static_cast<std::size_t>(rows));
  for (std::int64_t rows = 4; rows >= 1; --rows) check(rows, 4);
  for (auto* t : {&recorded, &plain}) t->parameters[1].set_requires_grad(false);
  check(2, 5);
  CHECK_FALSE(recorded.parameters[1].grad().defined());
  for (auto* t : {&recorded, &plain}) t->parameters[1].set_requires_grad(true);
  check(1, 5);
  recorded.streamer.close();
  check(1, 6);
  const auto other = model.adapter(1, 0, cuda), alike = model.adapter(1, 0, cuda);
  recorded.streamer.attach(other.table(model.lora_blocks()));
  plain.streamer.attach(alike.table(model.lora_blocks()));
  recorded.parameters = recorded.streamer.parameters();
  plain.parameters = plain.streamer.parameters();
  check(1, 7);
  check(1, 7);
}

TEST_CASE("captured step: a graph that somebody holds does not spoil the recording") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  Trained<> recorded{model, support::toy_options()}, plain{model, support::toy_options()};
  ToyContext context;
  const at::Tensor x = input_of(5, 1), y = input_of(5, 2);
  const at::Tensor held = distance(recorded.streamer.forward(x, context), std::array{y});
  auto captured = recorded.streamer.capture_step(distance);
  const at::Tensor loss = captured.run(x, {y});
  CHECK(same(loss, held.detach()));
  recorded.forget();
  held.backward();  // its parameters are what they were
  (void)plain.plain(x, y, context);
  CHECK(same_gradients(recorded.parameters, plain.parameters));
}

TEST_CASE("captured step: what cannot be recorded is refused with its reason, nothing is lost") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  {
    CudaStreamer streamer{model.blocks(), model.storage("file"), bs::CudaBackend{0},
                          support::toy_options()};
    check_refused<bs::UnsupportedError>([&] { (void)streamer.capture_step(distance); },
                                        "a graph cannot wait for reads");
    auto options = support::toy_options();
    options.activations.place = bs::ActivationPlace::ram;
    CudaStreamer moved{model.blocks(), model.storage("ram"), bs::CudaBackend{0}, options};
    check_refused<bs::UnsupportedError>([&] { (void)moved.capture_step(distance); },
                                        "elsewhere than on the device");
    CudaStreamer frozen{model.blocks(), model.storage("ram"), bs::CudaBackend{0},
                        support::toy_options()};
    auto captured = frozen.capture_step(distance);
    check_refused<bs::UnsupportedError>(
        [&] { (void)captured.run(input_of(2, 1), {input_of(2, 1)}); },
        "nothing of the list trains");
  }
  Trained<> recorded{model, support::toy_options()}, plain{model, support::toy_options()};
  ToyContext context;
  const at::Tensor x = input_of(5, 1), y = input_of(5, 2);
  const auto check = [&](const bs::StepLoss<support::ToyBlock>& loss, const ToyContext& faulty,
                         const std::string& part, const at::Tensor& input) {
    auto captured = recorded.streamer.capture_step(loss, faulty);
    INFO(part);
    check_refused<bs::UnsupportedError>([&] { (void)captured.run(input, {y}); }, part);
    CHECK(captured.recorded_count() == 0);
    recorded.forget();
    plain.forget();
    CHECK(same(recorded.plain(x, y, context), plain.plain(x, y, context)));
    CHECK(same_gradients(recorded.parameters, plain.parameters));
    CHECK_NOTHROW(at::rand({3}, x.options()).sum().item<float>());  // random numbers go on
    auto again = recorded.streamer.capture_step(distance);
    recorded.forget();
    CHECK(same(again.run(x, {y}), plain.plain(x, y, context)));
    CHECK(cudaGetLastError() == cudaSuccess);
  };
  using Targets = std::span<const at::Tensor>;
  int visits = 0;
  for (const int at : {3, 8}) {  // in a recorded forward, in its backward; 12 visits came before
    ToyContext faulty;
    faulty.before_block = [&, at](std::size_t) {
      if (visits++ == at + 12) (void)x.sum().item<float>();
    };
    visits = 0;
    check(distance, faulty, "block", x);
  }
  const auto item = [](const at::Tensor& output, Targets targets) {
    const at::Tensor loss = distance(output, targets);
    return loss / loss.item<double>();
  };
  check(item, context, "the loss cannot be recorded", x);
  check([&](const at::Tensor&, Targets) { return x.sum(); }, context, "does not depend", x);
  const at::Tensor head = input_of(5, 9).set_requires_grad(true);
  check([&](const at::Tensor& output, Targets t) { return distance(output * head, t); }, context,
        "another tensor that needs a gradient", x);
  check(distance, context, "its input needs a gradient", x.clone().set_requires_grad(true));
  {
    auto captured = recorded.streamer.capture_step(distance);
    (void)captured.run(x, {y});
    check_refused<bs::UnsupportedError>(
        [&] { (void)captured.run(x.clone().set_requires_grad(true), {y}); }, "needs a gradient");
    check_refused<bs::ContractViolation>([&] { (void)captured.run(x, {y.cpu()}); }, "targets");
  }
  ToyContext host_random;
  host_random.before_block = [](std::size_t) { (void)at::rand({1}); };
  check(distance, host_random, "random numbers on the host", x);
  // A streamed pass inside of the loss: of the same streamer, and of another.
  check(
      [&](const at::Tensor& output, Targets t) {
        const c10::NoGradGuard no_grad;
        ToyContext own;
        (void)plain.streamer.forward(x, own);
        const c10::AutoGradMode grad{true};
        return distance(output, t);
      },
      context, "cannot join", x);
  {
    const at::Tensor& p = recorded.parameters[0];
    const auto refused = [&](auto& captured) {
      check_refused<bs::UnsupportedError>([&] { (void)captured.run(x, {y}); }, "hooks");
    };
    auto before = recorded.streamer.capture_step(distance);
    (void)before.run(x, {y});
    (void)p.register_hook([](const at::Tensor& gradient) { return gradient; });
    auto after = recorded.streamer.capture_step(distance);
    refused(before);
    refused(after);
  }
}

TEST_CASE("captured step: slots that are spoilt before each copy, and delays on either stream") {
  if (!support::cuda_usable()) return;
  /// As in ordering_cuda_test: who reads too early has NaN in its result.
  struct Spoiling : bs::CudaBackend {
    explicit Spoiling(bs::CudaBackend backend) : bs::CudaBackend{std::move(backend)} {}
    void copy_async(std::span<std::byte> to, std::span<const std::byte> from,
                    bs::CopyDirection direction, Stream& stream) {
      if (direction == bs::CopyDirection::host_to_device && !to.empty()) {
        REQUIRE(cudaMemsetAsync(to.data(), 0xFF, to.size(), stream.native()) == cudaSuccess);
        const c10::cuda::CUDAStreamGuard guard{
            c10::cuda::getStreamFromExternal(stream.native(), 0)};
        at::cuda::sleep(60'000);
      }
      bs::CudaBackend::copy_async(to, from, direction, stream);
    }
  };
  const ToyModel model;
  for (const bool slow_kernels : {false, true}) {
    for (const std::uint32_t ahead : {0U, 1U, 2U}) {
      for (const double share : {0.0, 0.5}) {
        const auto options = options_with(ahead, share, model);
        Trained<Spoiling> recorded{model, options};
        Trained<> plain{model, options};
        ToyContext slow, context;
        if (slow_kernels) slow.before_block = [](std::size_t) { at::cuda::sleep(150'000); };
        auto captured = recorded.streamer.capture_step(distance, slow);
        INFO("ahead " << ahead << " share " << share << " slow " << slow_kernels);
        CHECK(differences(captured, recorded, plain, 20, context) == 0);
      }
    }
  }
}

TEST_CASE("captured step: steps on streams that change, with nothing waited for in between") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  Trained<> recorded{model, support::toy_options()}, plain{model, support::toy_options()};
  ToyContext slow, context;
  slow.before_block = [](std::size_t) { at::cuda::sleep(500'000); };
  auto captured = recorded.streamer.capture_step(distance, slow);
  std::vector<at::Tensor> inputs, targets, losses, expected;
  for (std::int64_t s = 0; s < 12; ++s) {
    inputs.push_back(input_of(5, s));
    targets.push_back(input_of(5, 30 + s));
    plain.forget();
    expected.push_back(plain.plain(inputs.back(), targets.back(), context));
  }
  c10::cuda::device_synchronize();
  std::vector<std::vector<at::Tensor>> gradients;
  for (std::size_t s = 0; s < inputs.size(); ++s) {
    const c10::cuda::CUDAStreamGuard guard{c10::cuda::getStreamFromPool()};
    recorded.forget();
    losses.push_back(captured.run(inputs[s], {targets[s]}));
  }
  c10::cuda::device_synchronize();
  for (std::size_t s = 0; s < inputs.size(); ++s) CHECK(same(losses[s], expected[s]));
  CHECK(same_gradients(recorded.parameters, plain.parameters));
}

TEST_CASE("captured step: the vector clocks find every access of a recorded step ordered") {
  if (!support::cuda_usable()) return;
  using Backend = bs::CheckedBackend<bs::CudaBackend>;
  const ToyModel model;
  for (const double share : {0.0, 0.5}) {
    for (const double top : {1.0, 0.5}) {
      Backend backend{bs::CudaBackend{0}};
      const bs::ViolationLog log = backend.log();
      {
        const auto options = options_with(1, share, model);
        Trained<Backend> recorded{model, options, top, 0, backend};
        Trained<> plain{model, options, top};
        auto captured = recorded.streamer.capture_step(distance);
        ToyContext context;
        CHECK(differences(captured, recorded, plain, 8, context) == 0);
      }
      INFO(to_string(log));
      CHECK(log.empty());
    }
  }
}

TEST_CASE("captured step: a replay makes no synchronising call and takes no memory") {
  if (!support::cuda_usable()) return;
  using Backend = bs::CountingBackend<bs::CudaBackend>;
  const ToyModel model;
  Backend backend{bs::CudaBackend{0}};
  Trained<Backend> recorded{model, support::toy_options(), 1, 0, backend};
  auto captured = recorded.streamer.capture_step(distance);
  const at::Tensor x = input_of(5, 1), y = input_of(5, 2);
  (void)captured.run(x, {y});
  const auto calls = [&] {
    return backend.counts().synchronizes.load() + backend.counts().queries.load() +
           backend.counts().notifies.load() + backend.counts().allocations.load();
  };
  const auto before = calls();
  for (int i = 0; i < 5; ++i) {
    recorded.forget();
    (void)captured.run(x, {y});
  }
  CHECK(calls() == before);
  recorded.streamer.drain();
}

TEST_CASE("captured step: a decoder with final norm, head and chunked loss, 20 steps of AdamW") {
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
  config.layer_count = 6;
  bs::BlockLayout layout;
  std::uint64_t end = 0;
  for (const bs::ExpectedTensor& tensor : bs::decoder_block_tensors(config)) {
    const std::uint64_t begin = bs::round_up(end, bs::tensor_alignment);
    const std::uint64_t bytes = bs::dense_byte_count(bs::DType::bf16, tensor.shape).value();
    layout.tensors.push_back({{tensor.name, bs::DType::bf16, tensor.shape}, 0, begin, bytes});
    end = begin + bytes;
  }
  layout.slot_byte_count = {end};
  constexpr std::int64_t vocabulary = 331;
  const at::Tensor frequencies = bs::models::rotary_frequencies_of(config).to(cuda);
  const auto half = at::TensorOptions{}.dtype(at::kBFloat16).device(cuda);
  const at::Tensor norm = at::ones({64}, half), head = at::randn({vocabulary, 64}, half) * 0.1;
  const auto loss_of = [&](const at::Tensor& hidden, std::span<const at::Tensor> targets) {
    const auto logits_of = [&](const at::Tensor& rows) {
      return at::linear(bs::rms_norm(rows, norm, config.rms_norm_eps), head);
    };
    bs::ChunkedLossOptions options;
    options.logits_byte_count = 4 * vocabulary * 10;  // several chunks
    return bs::chunked_token_loss(logits_of, hidden, bs::ScoredTokens{targets[0], targets[1]},
                                  vocabulary, options)
               .sum *
           targets[2];
  };
  struct Side {
    std::vector<Block> blocks;
    std::vector<bs::LoraBlock> lora_blocks;
    bs::RamStorage storage;
    std::optional<bs::LoraAdapter> adapter{};
    bs::AdamW adamw{};
  };
  const auto make = [&] {
    Side side{{}, {}, bs::RamStorage{std::vector<bs::BlockLayout>(config.layer_count, layout)}};
    auto generator = at::detail::createCPUGenerator(3);
    for (std::size_t b = 0; b < config.layer_count; ++b) {
      side.blocks.emplace_back(config, b);
      side.lora_blocks.push_back({bs::decoder_block_prefix(b), side.blocks.back().weight_specs()});
      for (const bs::TensorPlacement& tensor : layout.tensors) {
        at::Tensor to = bs::view_of(side.storage.writable_bytes(bs::block_at(b), tensor),
                                    tensor.spec, at::Device{at::kCPU});
        to.copy_(at::randn(to.sizes(), generator) * 0.1);
      }
    }
    bs::LoraOptions lora;
    lora.rank = 4;
    side.adapter = bs::make_lora_adapter(side.lora_blocks, lora, cuda);
    for (const auto& module : side.adapter->modules()) {
      const c10::NoGradGuard no_grad;
      module.b.copy_(at::randn(module.b.sizes(), generator) * 0.1);
    }
    return side;
  };
  for (const std::uint64_t cached : {0, 3, 6}) {
    for (const std::uint32_t ahead : {1U, 2U}) {
      auto a = make(), b = make();
      const auto adapter_a = *a.adapter, adapter_b = *b.adapter;
      bs::Streamer recorded{std::move(a.blocks),
                            std::move(a.storage),
                            bs::CudaBackend{0},
                            {.prefetch_ahead = ahead, .device_budget = cached * end}};
      bs::Streamer plain{std::move(b.blocks),
                         std::move(b.storage),
                         bs::CudaBackend{0},
                         {.prefetch_ahead = ahead, .device_budget = cached * end}};
      recorded.attach(adapter_a.table(a.lora_blocks));
      plain.attach(adapter_b.table(b.lora_blocks));
      plain.train();
      auto pa = recorded.parameters(), pb = plain.parameters();
      auto captured = recorded.capture_step(
          loss_of, bs::models::make_context(1, 1, frequencies, at::kBFloat16));
      int wrong = 0;
      for (std::uint64_t s = 1; s <= 20; ++s) {
        const std::int64_t rows = s % 4 == 0 ? 1 : 2;
        const auto padding = s % 5 == 0
                                 ? std::vector<std::int64_t>(static_cast<std::size_t>(rows), 2)
                                 : std::vector<std::int64_t>{};
        bs::models::ContextOptions how;
        how.left_padding = padding;
        auto ca = bs::models::make_context(rows, 33, frequencies, at::kBFloat16, how), cb = ca;
        const at::Tensor x = at::randn({rows, 33, 64}, half);
        bs::TokenTargets targets;
        targets.targets = at::randint(vocabulary, {rows, 33}, at::TensorOptions{}.dtype(at::kLong));
        targets.targets.select(1, static_cast<std::int64_t>(s)).fill_(bs::unscored);
        const bs::ScoredTokens scored = bs::scored_tokens(targets, cuda);
        const std::vector<at::Tensor> given{
            scored.positions, scored.wanted,
            at::full({}, 1.0 / static_cast<double>(s), at::TensorOptions{}.device(cuda))};
        for (auto* list : {&pa, &pb}) {
          for (const at::Tensor& p : *list) p.mutable_grad() = at::Tensor{};
        }
        const at::Tensor expected = loss_of(plain.forward(x, cb), given);
        expected.backward();
        const at::Tensor loss = captured.run(x, ca, given);
        wrong += same(loss, expected.detach()) && same_gradients(pa, pb) ? 0 : 1;
        for (const at::Tensor& p : pa) wrong += p.grad().isfinite().all().item<bool>() ? 0 : 100;
        a.adamw.step(pa, {.step = s, .learning_rate = 1e-2});
        b.adamw.step(pb, {.step = s, .learning_rate = 1e-2});
      }
      INFO("cached " << cached << " ahead " << ahead);
      CHECK(wrong == 0);
      CHECK(same_values(pa, pb));
      CHECK(captured.recorded_count() == 4);  // rows, with padding or without
    }
  }
}

TEST_CASE("captured step: under autocast, and without it") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  Trained<> recorded{model, support::toy_options()}, plain{model, support::toy_options()};
  auto captured = recorded.streamer.capture_step(distance);
  ToyContext context;
  for (std::int64_t s = 0; s < 6; ++s) {
    at::autocast::set_autocast_enabled(at::kCUDA, s % 3 != 2);
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
    recorded.forget();
    plain.forget();
    const at::Tensor x = input_of(5, s), y = input_of(5, 9);
    CHECK(same(captured.run(x, {y}), plain.plain(x, y, context)));
    CHECK(same_gradients(recorded.parameters, plain.parameters));
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCUDA, false);
  }
  CHECK(captured.recorded_count() == 2);
}

TEST_CASE("captured step: as the documents show it") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  Trained<> trained{model, support::toy_options()}, plain{model, support::toy_options()};
  auto& streamer = trained.streamer;
  auto& adamw = trained.adamw;
  std::vector<std::pair<at::Tensor, at::Tensor>> batches;
  for (std::int64_t n = 0; n < 10; ++n) batches.emplace_back(input_of(5, n), input_of(5, 50 + n));
  std::vector<at::Tensor> losses;
  // [step]
  auto step = streamer.capture_step([](const at::Tensor& y, std::span<const at::Tensor> targets) {
    return at::mse_loss(y, targets[0]);  // while a step is recorded; then the graph does it
  });
  std::vector<at::Tensor> parameters = streamer.parameters();
  std::uint64_t number = 0;
  for (const auto& [x, target] : batches) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor{};
    losses.push_back(step.run(x, {target}));  // fills .grad, as a backward does
    adamw.step(parameters, {.step = ++number, .learning_rate = 2e-2});
  }
  // [/step]
  ToyContext context;
  for (std::size_t n = 0; n < losses.size(); ++n) {
    plain.forget();
    CHECK(same(losses[n], plain.plain(batches[n].first, batches[n].second, context)));
    plain.optimize();
  }
}
