// SPDX-License-Identifier: Apache-2.0
// Inputs of blocks that wait on the device, in host memory or in a file for their backward.
#include "device_meter.hpp"
#include "mlps.hpp"

#include <block_streamer/device/checked_backend.hpp>

#include <ATen/Context.h>

#include <support/catch.hpp>
#include <support/fresh_folder.hpp>

#include <filesystem>
#include <optional>
#include <stdexcept>
#include <thread>

#if defined(__unix__)
#include <sys/resource.h>
#include <csignal>
#endif

namespace bs = block_streamer;
using support::make_mlps;
using support::parameters_of;
using support::same_bits;

namespace {

constexpr auto attached = bs::HostMode::attached, detached = bs::HostMode::detached;

/// A folder for files of activations, removed at the end.
struct Folder {
  std::filesystem::path path = support::fresh_folder("activations-");
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

bs::StreamerOptions options_for(bs::ActivationPlace place, const Folder& folder,
                                std::uint32_t ahead = 1) {
  bs::StreamerOptions options = support::train_options(ahead);
  options.activations.place = place;
  if (place == bs::ActivationPlace::file) options.activations.folder = folder.path;
  return options;
}

template <class Backend, class Block>
auto stream(std::vector<Block> blocks, Backend backend, const bs::StreamerOptions& options) {
  auto storage = bs::ram_storage_of(blocks);
  bs::Streamer streamer{std::move(blocks), std::move(storage), std::move(backend), options};
  streamer.train();
  return streamer;
}

/// Parameters' gradients, then inputs'.
using Gradients = std::vector<at::Tensor>;

std::vector<at::Tensor> batches_of(std::size_t count) {
  std::vector<at::Tensor> inputs;
  for (std::size_t i = 0; i < count; ++i) {
    auto generator = at::detail::createCPUGenerator(60 + i);
    inputs.push_back(at::randn({static_cast<std::int64_t>(8 + 8 * i), support::width}, generator)
                         .set_requires_grad(true));
  }
  return inputs;
}

template <class Streamer>
Gradients gradients_of(Streamer& streamer, std::size_t micro_batches) {
  const auto inputs = batches_of(micro_batches);
  at::manual_seed(11);
  at::Tensor loss;
  for (const at::Tensor& output : streamer.forward(inputs)) {
    const at::Tensor own = output.square().sum();
    loss = loss.defined() ? loss + own : own;
  }
  loss.backward();
  Gradients all;
  for (const at::Tensor& parameter : streamer.parameters()) {
    all.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor{};
  }
  for (const at::Tensor& input : inputs) all.push_back(input.grad());
  return all;
}

/// The inputs of 5 small blocks, in bytes.
std::uint64_t bytes_of_inputs(std::size_t micro_batches) {
  std::uint64_t bytes = 0;
  for (const at::Tensor& input : batches_of(micro_batches)) bytes += 5 * input.nbytes();
  return bytes;
}

/// `count` blocks x -> tanh(x * w) over rows of `width`; nothing in them trains.
std::vector<bs::FunctionBlock<>> deep_list(int count, std::int64_t width) {
  std::vector<bs::FunctionBlock<>> blocks;
  for (int i = 0; i < count; ++i) {
    blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", at::full({width}, 1.0 + 0.001 * i)}},
                        [](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                          return at::tanh(x * w[0]);
                        });
  }
  return blocks;
}

}  // namespace

TEST_CASE(
    "b101 gradients have the same bits wherever inputs wait: place x mode x depth x micro-batches, "
    "with dropout") {
  const Folder folder;
  for (const std::size_t micro_batches : {1U, 3U}) {
    std::optional<Gradients> expected;
    for (const auto mode : {attached, detached}) {
      for (const auto place :
           {bs::ActivationPlace::device, bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
        for (std::uint32_t ahead = 0; ahead <= 2; ++ahead) {
          INFO("detached " << (mode == detached) << " place " << static_cast<int>(place)
                           << " ahead " << ahead << " micro-batches " << micro_batches);
          const auto modules = make_mlps(5, 0.3);
          auto streamer = stream(support::blocks_of(modules), bs::HostBackend{mode},
                                 options_for(place, folder, ahead));
          for (int step = 0; step < 2; ++step) {
            const Gradients found = gradients_of(streamer, micro_batches);
            if (!expected) expected = found;
            CHECK(support::same_values(found, *expected));
          }
          const bool moves = place == bs::ActivationPlace::file ||
                             (place == bs::ActivationPlace::ram && mode == detached);
          const bs::ActivationUsage usage = streamer.activations();
          CHECK(usage.bytes_out == (moves ? 2 * bytes_of_inputs(micro_batches) : 0));
          CHECK(usage.bytes_in == usage.bytes_out);
          CHECK(usage.device_bytes == 0);
          if (!moves) CHECK(usage.peak_device_bytes == bytes_of_inputs(micro_batches));
          if (moves)
            CHECK(usage.peak_device_bytes <= 2 * batches_of(micro_batches).back().nbytes());
          CHECK(std::filesystem::is_empty(folder.path));  // the file has no name
        }
      }
    }
  }
}

TEST_CASE("96 blocks hold two inputs on the device, and so do 12, by LibTorch's own allocations") {
  const Folder folder;
  const std::int64_t rows = 128, width = 64;
  const std::uint64_t input_bytes = 4 * rows * width;
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    std::vector<std::uint64_t> peaks;
    std::optional<at::Tensor> expected;
    for (const int count : {12, 96}) {
      auto streamer =
          stream(deep_list(count, width), bs::HostBackend{detached}, options_for(place, folder));
      const at::Tensor x = at::full({rows, width}, 0.5).requires_grad_();
      const support::DeviceMeter meter{input_bytes / 2};
      streamer.forward(x).sum().backward();
      peaks.push_back(meter.peak());
      CHECK(streamer.activations().peak_device_bytes <= 2 * input_bytes);
      CHECK(streamer.activations().bytes_in == count * input_bytes);
      if (place == bs::ActivationPlace::ram)
        CHECK(streamer.activations().host_bytes == count * input_bytes);
      if (count != 96) continue;
      auto kept = stream(deep_list(count, width), bs::HostBackend{detached},
                         options_for(bs::ActivationPlace::device, folder));
      const at::Tensor same = at::full({rows, width}, 0.5).requires_grad_();
      const support::DeviceMeter other{input_bytes / 2};
      kept.forward(same).sum().backward();
      CHECK(other.peak() > 90 * input_bytes);
      CHECK(same_bits(x.grad(), same.grad()));
    }
    INFO("place " << static_cast<int>(place) << " peaks " << peaks[0] << " " << peaks[1]);
    CHECK(peaks[1] <= 8 * input_bytes);  // two inputs, and one block's forward and backward
    CHECK(peaks[1] == peaks[0]);
  }
}

TEST_CASE("32,768 tokens: the device holds two inputs of a pass, micro-batches two of theirs") {
  const Folder folder;
  constexpr std::int64_t tokens = 32768, width = 8;
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    for (const std::int64_t micro_batches : {1, 4}) {
      auto streamer =
          stream(deep_list(12, width), bs::HostBackend{detached}, options_for(place, folder));
      const at::Tensor x = at::full({1, tokens, width}, 0.25).requires_grad_();
      const std::uint64_t one = 4 * tokens * width / micro_batches;
      const support::DeviceMeter meter{one / 2};
      at::Tensor loss;
      for (const at::Tensor& output : streamer.forward(x.split(tokens / micro_batches, 1)))
        loss = loss.defined() ? loss + output.sum() : output.sum();
      loss.backward();
      CHECK(streamer.activations().peak_device_bytes <= 2 * one);
      // Beside two inputs: one block's forward and backward, what flows of each micro-batch, and
      // its output, which the caller holds, and the gradient of all.
      CHECK(meter.peak() <= 8 * one + 4 * 4 * tokens * width);
      const at::Tensor same = at::full({1, tokens, width}, 0.25).requires_grad_();
      auto kept = stream(deep_list(12, width), bs::HostBackend{},
                         options_for(bs::ActivationPlace::device, folder));
      kept.forward(same).sum().backward();
      CHECK(same_bits(x.grad(), same.grad()));
    }
  }
}

TEST_CASE("inputs that no backward comes down to are not saved") {
  const Folder folder;
  for (const auto place : {bs::ActivationPlace::device, bs::ActivationPlace::ram}) {
    const auto modules = make_mlps();
    for (std::size_t i = 0; i < 3; ++i) {
      for (auto& parameter : modules[i]->parameters()) parameter.set_requires_grad(false);
    }
    auto streamer =
        stream(support::blocks_of(modules), bs::HostBackend{detached}, options_for(place, folder));
    const at::Tensor x = batches_of(1)[0].detach();
    const at::Tensor output = streamer.forward(x);
    const auto usage = streamer.activations();
    CHECK(usage.device_bytes + usage.bytes_out == 2 * x.nbytes());
    output.sum().backward();
    CHECK(modules[3]->up->weight.grad().defined());
    CHECK_FALSE(modules[2]->up->weight.grad().defined());
  }
}

TEST_CASE("b75 slices, transposed, expanded and unaligned inputs keep how they lie, and bits") {
  const Folder folder;
  const at::Tensor base = at::randn({40, 40}, at::detail::createCPUGenerator(3));
  const std::vector<at::Tensor> inputs{
      base.narrow(1, 5, support::width),      // a slice
      base.narrow(0, 0, support::width).t(),  // transposed
      base.narrow(0, 0, 1).narrow(1, 0, support::width).expand({16, -1}),
      base.flatten().narrow(0, 1, 10 * support::width).view({10, support::width}),  // unaligned
      base.flatten().narrow(0, 16, 10 * support::width).view({10, support::width})};
  std::optional<std::vector<at::Tensor>> expected;
  for (const auto place :
       {bs::ActivationPlace::device, bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    const auto modules = make_mlps(1);
    auto streamer =
        stream(support::blocks_of(modules), bs::HostBackend{detached}, options_for(place, folder));
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& input : inputs) {
      const auto before = streamer.activations().bytes_out;
      streamer.forward(input).square().sum().backward();
      gradients.push_back(modules[0]->up->weight.grad().clone());
      const bool movable = bs::is_movable(input);
      CHECK(streamer.activations().bytes_out - before ==
            (movable && place != bs::ActivationPlace::device ? input.nbytes() : 0));
    }
    if (!expected) expected = gradients;
    CHECK(support::same_values(gradients, *expected));
  }
  CHECK(bs::is_movable(inputs[4]));
  CHECK_FALSE(bs::is_movable(inputs[0]));
}

TEST_CASE("graphs dropped, two alive, kept, run on another thread, and one that outlives all") {
  const Folder folder;
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    for (const auto mode : {attached, detached}) {
      auto reference = make_mlps();
      const auto modules = make_mlps();
      const auto inputs = batches_of(3);
      at::Tensor last;
      {
        auto streamer =
            stream(support::blocks_of(modules), bs::HostBackend{mode}, options_for(place, folder));
        for (int i = 0; i < 3; ++i) (void)streamer.forward(inputs[0]);  // dropped
        const at::Tensor first = streamer.forward(inputs[0]).sum();
        const at::Tensor second = streamer.forward(inputs[1]).sum();
        first.backward({}, /*retain_graph=*/true);
        second.backward();
        std::thread{[&] { first.backward(); }}.join();
        last = streamer.forward(inputs[2]).sum();
      }
      last.backward();
      last = at::Tensor{};
      const auto same = batches_of(3);
      for (const std::size_t i : {0U, 1U, 0U, 2U})
        support::resident(reference, same[i]).sum().backward();
      CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
      CHECK(support::same_gradients(inputs, same));
    }
  }
}

TEST_CASE("pieces of host memory and of the file are used again, whatever the lengths") {
  const Folder folder;
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    const auto modules = make_mlps();
    auto streamer =
        stream(support::blocks_of(modules), bs::HostBackend{detached}, options_for(place, folder));
    std::uint64_t longest = 0;
    for (const std::int64_t rows : {16, 160, 32, 160, 16, 96, 160}) {
      const at::Tensor x = at::randn({rows, support::width});
      streamer.forward(x).sum().backward();
      longest = std::max<std::uint64_t>(longest, (x.nbytes() + 4095) / 4096 * 4096);
      CHECK(streamer.activations().host_bytes + streamer.activations().file_bytes <= 7 * longest);
    }
  }
}

TEST_CASE("a caller may change the input after the forward: its bytes have left by then") {
  const Folder folder;
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    const auto modules = make_mlps(), same = make_mlps();
    auto streamer =
        stream(support::blocks_of(modules), bs::HostBackend{detached}, options_for(place, folder));
    auto other = stream(support::blocks_of(same), bs::HostBackend{},
                        options_for(bs::ActivationPlace::device, folder));
    at::Tensor x = batches_of(1)[0].detach().clone();
    other.forward(x).sum().backward();
    const at::Tensor output = streamer.forward(x);
    x.fill_(7);
    output.sum().backward();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(same)));
  }
}

TEST_CASE("a block that throws, in a forward or a backward, leaves places and streamer usable") {
  const Folder folder;
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    for (const auto mode : {attached, detached}) {
      int runs_left = 1000;
      std::vector<bs::FunctionBlock<>> blocks;
      for (int i = 0; i < 6; ++i) {
        blocks.emplace_back([&runs_left](const at::Tensor& x) {
          if (--runs_left < 0) throw std::runtime_error{"enough"};
          return at::tanh(x);
        });
      }
      auto streamer = stream(std::move(blocks), bs::HostBackend{mode}, options_for(place, folder));
      const at::Tensor x = at::full({16, 16}, 0.3).requires_grad_();
      runs_left = 4;
      CHECK_THROWS_WITH(streamer.forward(x), "enough");
      runs_left = 8;
      const at::Tensor loss = streamer.forward(x).sum();
      CHECK_THROWS_WITH(loss.backward(), "enough");
      if (place == bs::ActivationPlace::file || mode == detached)
        CHECK(streamer.activations().device_bytes == 0);  // nothing is on its way
      runs_left = 1000;
      streamer.forward(x).sum().backward();
      const at::Tensor other = at::full({16, 16}, 0.3).requires_grad_();
      at::Tensor y = other;
      for (int i = 0; i < 6; ++i) y = at::tanh(y);
      y.sum().backward();
      CHECK(same_bits(x.grad(), other.grad()));
    }
  }
}

TEST_CASE("a folder that is missing, and options that do not fit, are refused by name") {
  const auto modules = make_mlps();
  bs::StreamerOptions options = support::train_options(1);
  options.activations = {bs::ActivationPlace::file, "no-such-folder"};
  CHECK_THROWS_WITH(stream(support::blocks_of(modules), bs::HostBackend{}, options),
                    ContainsSubstring("no-such-folder") && ContainsSubstring("No such file"));
  options.activations = {bs::ActivationPlace::file, {}};
  CHECK_THROWS_AS(stream(support::blocks_of(modules), bs::HostBackend{}, options),
                  bs::ContractViolation);
  options.activations = {bs::ActivationPlace::ram, "folder"};
  CHECK_THROWS_AS(stream(support::blocks_of(modules), bs::HostBackend{}, options),
                  bs::ContractViolation);
}

#if defined(__unix__)
TEST_CASE("a file that cannot grow is an error with the cause, and the streamer stays usable") {
  const Folder folder;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const at::Tensor x = at::randn({100, support::width});
  for (const auto mode : {attached, detached}) {
    for (const rlim_t limit : {14000, 33000}) {  // the third of five inputs, or the last
      const auto modules = make_mlps();
      auto streamer = stream(support::blocks_of(modules), bs::HostBackend{mode},
                             options_for(bs::ActivationPlace::file, folder));
      rlimit old{};
      REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
      rlimit small = old;
      small.rlim_cur = limit;
      REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
      CHECK_THROWS_WITH(streamer.forward(x), ContainsSubstring(folder.path.string()) &&
                                                 ContainsSubstring("File too large") &&
                                                 ContainsSubstring("name another folder"));
      REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
      streamer.forward(x).sum().backward();
      CHECK(modules[0]->up->weight.grad().defined());
      CHECK(streamer.activations().device_bytes == 0);
    }
  }
  std::signal(SIGXFSZ, old_handler);
}
#endif

TEST_CASE("every access to inputs that leave and return is ordered") {
  using Backend = bs::CheckedBackend<bs::HostBackend>;
  const Folder folder;
  for (const auto place : {bs::ActivationPlace::ram, bs::ActivationPlace::file}) {
    for (const std::size_t micro_batches : {1U, 3U}) {
      Backend backend{bs::HostBackend{detached}};
      const auto modules = make_mlps();
      {
        auto streamer = stream(support::blocks_of(modules), backend, options_for(place, folder));
        for (int step = 0; step < 3; ++step) (void)gradients_of(streamer, micro_batches);
        for (const std::size_t longer : {2U, 4U}) (void)gradients_of(streamer, longer);
      }
      INFO("place " << static_cast<int>(place) << "\n" << to_string(backend.log()));
      CHECK(backend.log().empty());
    }
  }
}
