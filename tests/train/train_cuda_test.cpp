// SPDX-License-Identifier: Apache-2.0
// Full training on a CUDA device. Skips, saying why, where there is none.
#include "mlps.hpp"

#include <block_streamer/block/device_graph_cuda.hpp>
#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/host_edges.hpp>
#include <block_streamer/optim/sgd.hpp>

#include <ATen/Context.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <support/catch.hpp>
#include <support/cuda.hpp>
#include <support/fresh_folder.hpp>

#include <filesystem>
#include <limits>
#include <random>
#include <thread>

namespace bs = block_streamer;
using support::batch;
using support::cuda;
using support::make_mlps;
using support::parameters_of;

namespace {

template <class Backend, class Optimizer = bs::ExternalOptimizer>
auto stream(const std::vector<support::Mlp>& modules, Backend backend, std::uint32_t ahead,
            bool cached = false, Optimizer optimizer = {}) {
  auto blocks = support::blocks_of(modules);
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), std::move(backend),
                        support::train_options(ahead, cached), std::move(optimizer)};
  streamer.train();
  return streamer;
}

/// The gradients of both, on the host.
/// Wherever the gradients are.
bool same_gradients(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  const auto on_host = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.cpu() : tensor;
  };
  bool same = some.size() == others.size();
  for (std::size_t i = 0; same && i < some.size(); ++i)
    same = support::same_bits(on_host(some[i].grad()), on_host(others[i].grad()));
  return same;
}

/// Steps the host's, and gives the device's the same values: the two would round differently.
void step(const std::vector<at::Tensor>& host, const std::vector<at::Tensor>& device) {
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < host.size(); ++i) {
    if (!host[i].grad().defined()) continue;
    host[i].data().sub_(host[i].grad(), 0.05);  // as LibTorch's SGD: no version tells
    device[i].copy_(host[i]);
  }
}

constexpr bs::ActivationPlace places[] = {bs::ActivationPlace::device, bs::ActivationPlace::ram,
                                          bs::ActivationPlace::file};

/// Options for inputs that wait there; a folder for files, removed at the end.
struct Waiting {
  std::filesystem::path folder = support::fresh_folder("activations-");
  ~Waiting() {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  }
  [[nodiscard]] bs::StreamerOptions options(bs::ActivationPlace place,
                                            std::uint32_t ahead = 1) const {
    bs::StreamerOptions options = support::train_options(ahead);
    options.activations.place = place;
    if (place == bs::ActivationPlace::file) options.activations.folder = folder;
    return options;
  }
};

/// Frozen blocks x -> tanh(x * w), each of which first keeps the stream busy.
std::vector<bs::FunctionBlock<>> frozen_list(int count, std::int64_t width, std::int64_t cycles) {
  std::vector<bs::FunctionBlock<>> blocks;
  for (int i = 0; i < count; ++i) {
    blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", at::full({width}, 1.0 + 0.001 * i)}},
                        [cycles](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                          if (cycles > 0) at::cuda::sleep(cycles);
                          return at::tanh(x * w[0]);
                        });
  }
  return blocks;
}

template <class Block>
auto stream_list(std::vector<Block> blocks, const bs::StreamerOptions& options) {
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::CudaBackend{0}, options};
  streamer.train();
  return streamer;
}

/// Losses of all outputs, one backward.
void run_together(const std::vector<at::Tensor>& outputs) {
  at::Tensor loss;
  for (const at::Tensor& output : outputs) {
    const at::Tensor own = output.square().sum();
    loss = loss.defined() ? loss + own : own;
  }
  loss.backward();
}

}  // namespace

TEST_CASE("cuda: full training has the resident run's gradients, bit for bit") {
  if (!support::cuda_usable()) return;
  for (std::uint32_t ahead = 0; ahead <= 3; ++ahead) {
    for (const bool cached : {false, true}) {
      auto modules = make_mlps(), reference = make_mlps();
      for (auto& module : reference) module->to(cuda);
      auto streamer = stream(modules, bs::CudaBackend{0}, ahead, cached);
      const auto ours = parameters_of(modules), theirs = parameters_of(reference);
      INFO("ahead " << ahead << " cached " << cached);
      for (std::uint64_t s = 0; s < 6; ++s) {
        const auto clear = [](const std::vector<at::Tensor>& list) {
          for (const auto& parameter : list) parameter.mutable_grad() = at::Tensor{};
        };
        clear(ours);
        clear(theirs);
        const std::uint64_t micro_batches = s % 2 == 0 ? 1 : 3;  // 3: adds to .grad
        for (std::uint64_t micro = 0; micro < micro_batches; ++micro) {
          const auto x = batch(10 * s + micro).to(cuda);
          support::resident(reference, x).square().sum().backward();
          streamer.forward(x).square().sum().backward();
        }
        CHECK(same_gradients(ours, theirs));
        CHECK(ours[1].grad().device().is_cpu());
        step(ours, theirs);
        const c10::NoGradGuard no_grad;
        const auto x = batch(s).to(cuda);
        CHECK(support::same_bits(streamer.forward(x).cpu(), support::resident(reference, x).cpu()));
        for (const auto& parameter : ours) CHECK(parameter.device().is_cpu());
      }
    }
  }
}

TEST_CASE(
    "cuda: b96 under autocast gradients are the resident run's, bit for bit, dropout included") {
  if (!support::cuda_usable()) return;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (std::uint32_t ahead = 0; ahead <= 2; ++ahead) {
      auto modules = make_mlps(5, 0.3), reference = make_mlps(5, 0.3);
      for (auto& module : reference) module->to(cuda);
      auto streamer = stream(modules, bs::CudaBackend{0}, ahead);
      const bs::AutocastState callers = bs::AutocastState::capture(cuda);
      const auto run = [&](auto&& forward) {
        at::manual_seed(11);
        at::Tensor output;
        at::autocast::set_autocast_enabled(at::kCUDA, true);
        at::autocast::set_autocast_dtype(at::kCUDA, dtype);
        output = forward(batch(1).to(cuda));
        at::autocast::clear_cache();
        callers.apply();
        output.to(at::kFloat).square().sum().backward();
        return output.detach().cpu();
      };
      const auto ours = run([&](const at::Tensor& x) { return streamer.forward(x); });
      const auto theirs = run([&](const at::Tensor& x) { return support::resident(reference, x); });
      INFO(dtype << " ahead " << ahead);
      CHECK(support::same_bits(ours, theirs));
      CHECK(same_gradients(parameters_of(modules), parameters_of(reference)));
    }
  }
}

TEST_CASE("cuda: two forwards of one streamer in one loss, one beside or upon the other") {
  if (!support::cuda_usable()) return;
  auto modules = make_mlps(), reference = make_mlps();
  for (auto& module : reference) module->to(cuda);
  auto streamer = stream(modules, bs::CudaBackend{0}, 1);
  const auto loss = [](auto&& forward) {
    const auto x = batch(1).to(cuda), y = batch(2).to(cuda);
    return forward(x).square().sum() + forward(forward(y)).sum();
  };
  loss([&](const at::Tensor& x) { return support::resident(reference, x); }).backward();
  loss([&](const at::Tensor& x) { return streamer.forward(x); }).backward();
  const auto ours = parameters_of(modules), theirs = parameters_of(reference);
  for (std::size_t i = 0; i < ours.size(); ++i) {  // sums of three, taken in another order
    REQUIRE(ours[i].grad().defined() == theirs[i].grad().defined());
    if (!ours[i].grad().defined()) continue;
    CHECK(at::allclose(ours[i].grad(), theirs[i].grad().cpu(), 1e-4, 1e-4));
  }
}

TEST_CASE("cuda: a step in the backward equals a step after it, under slow kernels too") {
  if (!support::cuda_usable()) return;
  const auto make = [](std::vector<bs::FunctionBlock<>>& blocks, std::int64_t cycles) {
    std::vector<at::Tensor> weights;
    for (std::uint64_t i = 0; i < 6; ++i) {
      weights.push_back(
          (at::randn({12, 12}, at::detail::createCPUGenerator(i)) * 0.3).set_requires_grad(true));
      blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", weights.back()}},
                          [cycles](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                            if (cycles > 0) at::cuda::sleep(cycles);
                            return at::tanh(at::linear(x, w[0]));
                          });
    }
    return weights;
  };
  std::optional<std::vector<at::Tensor>> expected;
  for (const std::int64_t cycles : {0, 3000000}) {
    for (const bool in_step : {false, true}) {
      std::vector<bs::FunctionBlock<>> blocks;
      const auto weights = make(blocks, cycles);
      auto storage = bs::ram_storage_of(blocks);
      bs::Streamer streamer{std::move(blocks), std::move(storage), bs::CudaBackend{0},
                            support::train_options(1), bs::Sgd{{0.9}}};
      streamer.train();
      for (std::uint64_t s = 1; s <= 5; ++s) {
        const auto x = batch(s).to(cuda);
        auto loss = streamer.forward(x).square().sum();
        if (in_step) streamer.begin_step({s, 0.05, 1});
        loss.backward();
        in_step ? streamer.end_step() : streamer.step({s, 0.05, 1});
      }
      if (!expected) expected = weights;
      CHECK(support::same_values(weights, *expected));
    }
  }
}

TEST_CASE("cuda: a master used outside of the streamer too has the sum of both gradients") {
  if (!support::cuda_usable()) return;
  auto modules = make_mlps(), reference = make_mlps();
  for (auto& module : reference) module->to(cuda);
  auto streamer = stream(modules, bs::CudaBackend{0}, 1);
  const auto x = batch().to(cuda);
  const auto tied = modules[0]->up->weight.to(cuda);
  at::linear(streamer.forward(at::linear(at::linear(x, tied), tied.t())), tied).sum().backward();
  const auto other = reference[0]->up->weight;
  at::linear(support::resident(reference, at::linear(at::linear(x, other), other.t())), other)
      .sum()
      .backward();
  CHECK(modules[0]->up->weight.grad().allclose(other.grad().cpu(), 1e-4, 1e-4));
  CHECK(support::same_bits(modules[1]->up->weight.grad(), reference[1]->up->weight.grad().cpu()));
}

TEST_CASE("cuda: the vector clocks find every access to gradients ordered") {
  if (!support::cuda_usable()) return;
  using Backend = bs::CheckedBackend<bs::CudaBackend>;
  Backend backend{bs::CudaBackend{0}};
  auto modules = make_mlps();
  {
    auto streamer = stream(modules, backend, 1);
    const auto write_masters = [&] {
      for (const auto& parameter : streamer.parameters())
        backend.touch_on_host(bs::bytes_of(parameter), bs::Access::write);
    };
    // The backward runs on a thread of the engine's: that it has ended orders it before what
    // follows, which the clocks are told by a hook on that thread, after the streamed node.
    const char end_of_backward{};
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = batch().to(cuda).requires_grad_();
      x.register_hook([&](const at::Tensor& gradient) {
        bs::publish_host_edge(backend, &end_of_backward);
        return gradient;
      });
      streamer.forward(x).sum().backward();
      bs::accept_host_edge(backend, &end_of_backward);
      write_masters();
      const c10::NoGradGuard no_grad;
      (void)streamer.forward(batch().to(cuda));
      write_masters();
    }
  }
  INFO(to_string(backend.log()));
  CHECK(backend.log().empty());
}

TEST_CASE("cuda: micro-batches together have the bits of one after another, dropout included") {
  if (!support::cuda_usable()) return;
  for (const std::size_t count : {2U, 4U}) {
    auto modules = make_mlps(5, 0.3), reference = make_mlps(5, 0.3);
    auto ours = stream(modules, bs::CudaBackend{0}, 1),
         theirs = stream(reference, bs::CudaBackend{0}, 1);
    std::vector<at::Tensor> inputs, same;
    std::vector<bs::RngState> states;
    for (std::uint64_t i = 0; i < count; ++i) {
      inputs.push_back(batch(30 + i).to(cuda).requires_grad_());
      same.push_back(batch(30 + i).to(cuda).requires_grad_());
      states.push_back(bs::RngState::seeded(cuda, 50 + i));
    }
    auto alone = states;
    run_together(ours.forward(inputs, states));
    for (std::size_t i = 0; i < count; ++i) {
      alone[i].apply();
      theirs.forward(same[i]).square().sum().backward();
    }
    CHECK(same_gradients(parameters_of(modules), parameters_of(reference)));
    CHECK(same_gradients(same, inputs));
  }
}

TEST_CASE("cuda: inputs in host memory or in a file give the same bits, under slow kernels too") {
  if (!support::cuda_usable()) return;
  const Waiting waiting;
  for (const std::int64_t cycles : {0, 3000000}) {
    for (const std::size_t micro_batches : {1U, 3U}) {
      std::optional<std::vector<at::Tensor>> expected;
      for (const auto place : places) {
        for (const bool other_stream : {false, true}) {
          INFO("cycles " << cycles << " micro-batches " << micro_batches << " place "
                         << static_cast<int>(place) << " other stream " << other_stream);
          auto streamer = stream_list(frozen_list(9, 4096, cycles), waiting.options(place));
          std::optional<c10::cuda::CUDAStreamGuard> guard;
          if (other_stream) guard.emplace(c10::cuda::getStreamFromPool(false, 0));
          std::vector<at::Tensor> gradients;
          for (int step = 0; step < 2; ++step) {
            std::vector<at::Tensor> inputs;
            for (std::size_t i = 0; i < micro_batches; ++i) {
              inputs.push_back(at::randn({16 + 8 * static_cast<std::int64_t>(i), 4096},
                                         at::detail::createCPUGenerator(80 + i))
                                   .to(cuda)
                                   .requires_grad_());
            }
            run_together(streamer.forward(inputs));
            for (const at::Tensor& input : inputs) gradients.push_back(input.grad().cpu());
          }
          if (!expected) expected = gradients;
          CHECK(support::same_values(gradients, *expected));
          CHECK((streamer.activations().bytes_in > 0) == (place != bs::ActivationPlace::device));
        }
      }
    }
  }
}

TEST_CASE("cuda: full training with inputs elsewhere has the gradients of inputs on the device") {
  if (!support::cuda_usable()) return;
  const Waiting waiting;
  std::optional<std::vector<at::Tensor>> expected;
  for (const auto place : places) {
    for (std::uint32_t ahead = 0; ahead <= 2; ++ahead) {
      auto modules = make_mlps(5, 0.3);
      auto streamer = stream_list(support::blocks_of(modules), waiting.options(place, ahead));
      at::manual_seed(7);
      for (std::uint64_t s = 0; s < 3; ++s)
        run_together(streamer.forward(std::vector{batch(s).to(cuda), batch(s + 9).to(cuda)}));
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& parameter : parameters_of(modules))
        gradients.push_back(parameter.grad());
      if (!expected) expected = gradients;
      CHECK(support::same_values(gradients, *expected));
    }
  }
}

TEST_CASE("cuda: the device's peak does not grow with the depth when inputs wait elsewhere") {
  if (!support::cuda_usable()) return;
  const Waiting waiting;
  const std::int64_t tokens = 32768, width = 256;
  const std::uint64_t input_bytes = 4 * tokens * width;  // 32 MiB
  const auto peak_of = [&](bs::ActivationPlace place, int count) {
    auto streamer = stream_list(frozen_list(count, width, 0), waiting.options(place));
    const at::Tensor x = at::full({1, tokens, width}, 0.5, cuda).requires_grad_();
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    streamer.forward(x).sum().backward();
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    return static_cast<std::uint64_t>(stats.allocated_bytes[0].peak);
  };
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    const std::uint64_t few = peak_of(place, 12), many = peak_of(place, 96);
    INFO("place " << static_cast<int>(place) << " peaks " << few << " " << many);
    CHECK(many <= 12 * input_bytes);
    CHECK(many == few);
  }
  CHECK(peak_of(bs::ActivationPlace::device, 96) > 90 * input_bytes);
}

TEST_CASE("cuda: the vector clocks find every access to inputs that leave and return ordered") {
  if (!support::cuda_usable()) return;
  using Backend = bs::CheckedBackend<bs::CudaBackend>;
  const Waiting waiting;
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    Backend backend{bs::CudaBackend{0}};
    {
      auto blocks = frozen_list(6, 256, 100000);
      auto storage = bs::ram_storage_of(blocks);
      bs::Streamer streamer{std::move(blocks), std::move(storage), backend, waiting.options(place)};
      streamer.train();
      // As above: that the engine's thread has ended is told by hooks after the streamed node.
      const char end_of_backward{};
      for (int i = 0; i < 3; ++i) {
        std::vector<at::Tensor> inputs;
        for (int micro = 0; micro < 2; ++micro) {
          inputs.push_back(at::full({64, 256}, 0.1 * (i + 1), cuda).requires_grad_());
          inputs.back().register_hook([&](const at::Tensor& gradient) {
            bs::publish_host_edge(backend, &end_of_backward);
            return gradient;
          });
        }
        run_together(streamer.forward(inputs));
        bs::accept_host_edge(backend, &end_of_backward);
      }
    }
    INFO("place " << static_cast<int>(place) << "\n" << to_string(backend.log()));
    CHECK(backend.log().empty());
  }
}

TEST_CASE("cuda: b73 memory that comes and goes on a copy stream spoils no gradient in 50 runs") {
  if (!support::cuda_usable()) return;
  // Slots too are memory of that stream, in LibTorch's allocator.
  const auto side = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0);
  const bs::DeviceMemoryResource resource{
      [side](std::size_t byte_count) {
        return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(byte_count, side.stream());
      },
      [](void* memory, std::size_t) { c10::cuda::CUDACachingAllocator::raw_delete(memory); }};
  std::mt19937 random{73};
  const auto disturb = [&] {
    const c10::cuda::CUDAStreamGuard guard{side};
    for (int i = 0; i < 3; ++i) {
      const auto count = static_cast<std::int64_t>(1 + random() % (1U << 18));
      at::full({count}, std::numeric_limits<float>::quiet_NaN(), at::TensorOptions().device(cuda));
    }
  };
  std::vector<at::Tensor> weights, reference;
  std::vector<bs::FunctionBlock<>> blocks;
  for (std::uint64_t i = 0; i < 5; ++i) {
    const at::Tensor weight = at::randn({12, 12}, at::detail::createCPUGenerator(i)) * 0.3;
    weights.push_back(weight.clone().set_requires_grad(true));
    reference.push_back(weight.to(cuda).set_requires_grad(true));
    blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", weights.back()}},
                        [&](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                          disturb();
                          if (c10::GradMode::is_enabled()) at::cuda::sleep(300000);
                          const at::Tensor y = at::tanh(at::linear(x, w[0]));
                          disturb();
                          return y;
                        });
  }
  const at::Tensor x = batch().to(cuda);
  at::Tensor hidden = x;
  for (const at::Tensor& weight : reference) hidden = at::tanh(at::linear(hidden, weight));
  hidden.square().sum().backward();
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), bs::CudaBackend{0, resource},
                        support::train_options(1)};
  streamer.train();
  for (int run = 0; run < 50; ++run) {
    CAPTURE(run);
    for (const at::Tensor& weight : weights) weight.mutable_grad() = at::Tensor{};
    const at::Tensor loss = streamer.forward(x).square().sum();
    disturb();
    loss.backward();
    CHECK(same_gradients(weights, reference));
  }
}

TEST_CASE("cuda: b100 a backward on another thread replays both generators and draws of neither") {
  if (!support::cuda_usable()) return;
  const auto block = [](const at::Tensor& w, const at::Tensor& x) {
    const at::Tensor noise = at::randn({12});  // the CPU's
    return at::tanh(at::linear(at::dropout(x, 0.5, /*train=*/true) + noise.to(x.device()), w));
  };
  std::vector<at::Tensor> weights, reference;
  std::vector<bs::FunctionBlock<>> blocks;
  for (std::uint64_t i = 0; i < 3; ++i) {
    const at::Tensor weight = at::randn({12, 12}, at::detail::createCPUGenerator(i)) * 0.3;
    weights.push_back(weight.clone().set_requires_grad(true));
    reference.push_back(weight.to(cuda).set_requires_grad(true));
    blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", weights.back()}},
                        [block](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                          return block(w[0], x);
                        });
  }
  const at::Tensor x = batch().to(cuda);
  const auto draw = [] {
    return std::pair{at::randn({4}), at::randn({4}, at::TensorOptions().device(cuda)).cpu()};
  };
  at::manual_seed(11);
  at::Tensor hidden = x;
  for (const at::Tensor& weight : reference) hidden = block(weight, hidden);
  const auto next = draw(), after = draw();
  hidden.square().sum().backward();
  auto streamer = stream_list(std::move(blocks), support::train_options(1));
  at::manual_seed(11);
  const at::Tensor output = streamer.forward(x);
  const auto ours = draw();
  std::thread other{[&] { output.square().sum().backward(); }};
  other.join();
  const auto then = draw();
  CHECK(support::same_bits(ours.first, next.first));
  CHECK(support::same_bits(ours.second, next.second));
  CHECK(support::same_bits(then.first, after.first));
  CHECK(support::same_bits(then.second, after.second));
  CHECK(same_gradients(weights, reference));
}

TEST_CASE("captured: the modules' own weights are read anew by every replay") {
  if (!support::cuda_usable()) return;
  const auto modules = support::make_mlps();
  for (const bool cached : {false, true}) {
    auto blocks = support::blocks_of(modules);
    auto storage = bs::ram_storage_of(blocks);
    bs::Streamer streamer{std::move(blocks), std::move(storage), bs::CudaBackend{0},
                          support::train_options(1, cached)};
    const at::Tensor x = support::batch().to(cuda);
    auto captured = streamer.capture();
    const auto forward = [&] {
      const c10::NoGradGuard no_grad;
      return streamer.forward(x).cpu();
    };
    at::Tensor before = captured.forward(x).cpu();
    CHECK(support::same_bits(before, forward()));
    for (int step = 0; step < 3; ++step) {
      {
        const c10::NoGradGuard no_grad;
        for (at::Tensor& p : streamer.parameters()) p.mul_(1.25);
      }
      const at::Tensor now = captured.forward(x).cpu();
      CHECK_FALSE(support::same_bits(now, before));
      CHECK(support::same_bits(now, forward()));
      before = now;
    }
    CHECK(captured.recorded_count() == 1);
  }
}
