// SPDX-License-Identifier: Apache-2.0
// Order on a CUDA device: delays on either stream, slots that are spoilt before they are filled,
// and the device's own times. Skips, saying why, where there is no device.
#include "toy_model.hpp"

#include <block_streamer/block/stream_bridge_cuda.hpp>
#include <block_streamer/trace/lane_overlap.hpp>
#include <block_streamer/trace/perfetto_writer.hpp>

#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <support/catch.hpp>
#include <support/cuda.hpp>

#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace bs = block_streamer;
using support::cuda;
using support::same_bits;
using support::ToyContext;
using support::ToyModel;

namespace {

/// Fills a slot with NaN before each copy, and lets the copy wait: who reads too early or is
/// written over while it computes has NaN in its result.
class SpoilingBackend : public bs::CudaBackend {
 public:
  explicit SpoilingBackend(std::int64_t cycles)
      : bs::CudaBackend{0}, cycles_{std::make_shared<std::int64_t>(cycles)} {}
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from,
                  bs::CopyDirection direction, Stream& stream) {
    if (direction == bs::CopyDirection::host_to_device && !to.empty()) {
      REQUIRE(cudaMemsetAsync(to.data(), 0xFF, to.size(), stream.native()) == cudaSuccess);
      const c10::cuda::CUDAStreamGuard guard{c10::cuda::getStreamFromExternal(stream.native(), 0)};
      at::cuda::sleep(*cycles_);
    }
    bs::CudaBackend::copy_async(to, from, direction, stream);
  }
  void sleep_before_copies(std::int64_t cycles) { *cycles_ = cycles; }

 private:
  std::shared_ptr<std::int64_t> cycles_;
};

/// Output and gradients of one step.
template <class Streamer>
std::vector<at::Tensor> step(Streamer& streamer, const bs::LoraAdapter& adapter,
                             ToyContext& context) {
  at::Tensor input = support::toy_input(at::kFloat).to(cuda).set_requires_grad(true);
  for (const at::Tensor& p : adapter.parameters()) p.mutable_grad() = at::Tensor{};
  const at::Tensor output = streamer.forward(input, context);
  output.square().sum().backward();
  std::vector<at::Tensor> all{output.detach().cpu(), input.grad().cpu()};
  for (const at::Tensor& p : adapter.parameters()) all.push_back(p.grad().cpu());
  return all;
}

bool equal(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  bool same = some.size() == others.size();
  for (std::size_t i = 0; same && i < some.size(); ++i) same = same_bits(some[i], others[i]);
  return same;
}

}  // namespace

TEST_CASE("cuda: 100 steps with spoilt slots and delays on either stream have the same bits") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  const auto adapter = model.adapter(1, 0, cuda);
  std::mt19937 random{7};
  const auto delay = [&](int kind, int wanted) {
    return kind == wanted ? 0 : static_cast<std::int64_t>(random() % 400'000);
  };
  for (const std::string tier : {"ram", "file"}) {
    SpoilingBackend backend{0};
    support::ToyStreamer<SpoilingBackend> streamer{model.blocks(), model.storage(tier), backend,
                                                   support::toy_options()};
    streamer.attach(adapter.table(model.lora_blocks()));
    streamer.train();
    ToyContext plain;
    const auto expected = step(streamer, adapter, plain);
    CHECK_FALSE(expected[0].isnan().any().item<bool>());
    int wrong = 0;
    for (int i = 0; i < 100; ++i) {  // slow copies, slow kernels, both
      backend.sleep_before_copies(delay(i % 3, 0));
      ToyContext context;
      context.before_block = [&, i](std::size_t) { at::cuda::sleep(1 + delay(i % 3, 1)); };
      wrong += equal(step(streamer, adapter, context), expected) ? 0 : 1;
    }
    INFO(tier);
    CHECK(wrong == 0);
  }
}

TEST_CASE("cuda: streamers side by side, on threads and streams of their own, do not disturb") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  const auto work = [&model](const std::string& tier, std::int64_t cycles, int& wrong) {
    at::globalContext().setDeterministicAlgorithms(true, false);
    const c10::cuda::CUDAStreamGuard guard{c10::cuda::getStreamFromPool()};
    const auto adapter = model.adapter(1, 0, cuda);
    c10::cuda::getCurrentCUDAStream().synchronize();
    support::ToyStreamer<SpoilingBackend> streamer{model.blocks(), model.storage(tier),
                                                   SpoilingBackend{cycles}, support::toy_options()};
    streamer.attach(adapter.table(model.lora_blocks()));
    streamer.train();
    ToyContext context;
    const auto expected = step(streamer, adapter, context);
    for (int i = 0; i < 20; ++i) wrong += equal(step(streamer, adapter, context), expected) ? 0 : 1;
  };
  int wrong[3] = {};
  std::thread first{[&] { work("ram", 100'000, wrong[0]); }};
  std::thread second{[&] { work("file", 50'000, wrong[1]); }};
  work("ram", 1, wrong[2]);
  first.join();
  second.join();
  CHECK(wrong[0] + wrong[1] + wrong[2] == 0);
}

TEST_CASE("cuda: the timeline tells the device's own time, on the host's clock") {
  if (!support::cuda_usable()) return;
  const ToyModel model;
  const c10::InferenceMode inference;
  for (const std::string tier : {"ram", "file"}) {
    bs::PerfettoWriter writer;
    bs::StreamerOptions options = support::toy_options();
    options.trace = writer;
    support::ToyStreamer<bs::CudaBackend> streamer{model.blocks(), model.storage(tier),
                                                   bs::CudaBackend{0}, options};
    ToyContext context;
    context.before_block = [](std::size_t) { at::cuda::sleep(2'000'000); };  // about a millisecond
    const bs::CudaBackend clock{0};
    const bs::Nanoseconds before = clock.now();
    (void)streamer.forward(support::toy_input(at::kFloat).to(cuda), context);
    streamer.drain();
    const bs::Nanoseconds after = clock.now();
    const auto events = writer.events();
    std::map<bs::BlockId, bs::TraceEvent> computed;
    std::size_t enqueued = 0;
    for (const auto& event : events) {
      if (event.lane == bs::Lane::compute) computed[event.part.block] = event;
      if (event.lane == bs::Lane::caller) ++enqueued;
      if (event.lane == bs::Lane::storage) continue;
      CHECK(event.begin >= before);
      CHECK(event.end <= after + std::chrono::milliseconds{1});  // by as much may the anchor be off
    }
    const auto blocks = model.blocks();
    REQUIRE(computed.size() == blocks.size());
    CHECK(enqueued == events.size() - enqueued -
                          static_cast<std::size_t>(std::count_if(
                              events.begin(), events.end(),
                              [](const auto& event) { return event.lane == bs::Lane::storage; })));
    bs::Nanoseconds last{};
    for (const auto& [block, event] : computed) {
      CHECK(event.end - event.begin > std::chrono::microseconds{500});
      CHECK(event.begin >= last);
      last = event.end;
      // For this visit: copies for the next pass begin after it, which takes longer than the
      // anchors of the two streams differ.
      constexpr std::chrono::microseconds near{100};
      int copies = 0;
      for (const auto& copy : events) {
        if (copy.lane != bs::Lane::copy_in || copy.part.block != block) continue;
        if (copy.begin > event.begin + near) continue;
        ++copies;
        CHECK(copy.end < event.begin + 2 * near);
      }
      CHECK((copies > 0) == (blocks[bs::index_of(block)].inner > 0));  // or it has no parameters
    }
    const auto overlap = bs::overlap_of(events, bs::Lane::copy_in, bs::Lane::compute);
    CHECK(overlap.second > std::chrono::microseconds{500} * blocks.size());
    CHECK(overlap.both > bs::Nanoseconds{0});
  }
}
