// SPDX-License-Identifier: Apache-2.0
#include "mlps.hpp"

#include <block_streamer/block/any_block.hpp>

#include <torch/nn/modules/batchnorm.h>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::batch;
using support::make_mlps;
using support::Mlp;
using support::MlpBlock;
using support::modes;
using support::parameters_of;
using support::same_bits;
using support::train_options;

namespace {

using MlpStreamer =
    bs::Streamer<MlpBlock, bs::MasterStorage, bs::ExternalOptimizer, bs::HostBackend>;

MlpStreamer stream(const std::vector<Mlp>& modules, bs::HostMode mode, std::uint32_t ahead = 1,
                   bool cached = false) {
  auto blocks = support::blocks_of(modules);
  auto storage = bs::ram_storage_of(blocks);
  MlpStreamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode},
                       train_options(ahead, cached)};
  streamer.train();
  return streamer;
}

/// Two maps over one weight, which another module may use as well.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(const at::Tensor& weight) {
    first = register_parameter("first", weight);
    second = register_parameter("second", weight);
    own = register_parameter("own", torch::full({support::width}, 0.1));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + at::linear(at::tanh(at::linear(x, first)), second, own);
  }
  at::Tensor first, second, own;
};

std::vector<std::shared_ptr<TiedImpl>> make_tied() {
  const auto shared = at::randn({12, 12}, at::detail::createCPUGenerator(5)) * 0.3;
  const auto other = at::randn({12, 12}, at::detail::createCPUGenerator(6)) * 0.3;
  std::vector<std::shared_ptr<TiedImpl>> modules;
  const auto weight = shared.clone().set_requires_grad(true);
  modules.push_back(std::make_shared<TiedImpl>(other.clone().set_requires_grad(true)));
  for (int i = 0; i < 3; ++i) modules.push_back(std::make_shared<TiedImpl>(weight));
  return modules;
}

}  // namespace

TEST_CASE("a storage of fewer or more blocks than the list is refused, also of a list moved away") {
  const auto modules = make_mlps();
  const auto blocks = support::blocks_of(modules);
  auto fewer = blocks;
  fewer.pop_back();
  const auto refused = ContainsSubstring("as many blocks as the list");
  const bs::HostBackend backend;
  CHECK_THROWS_WITH((MlpStreamer{blocks, bs::ram_storage_of(fewer), backend, {}}), refused);
  CHECK_THROWS_WITH((MlpStreamer{fewer, bs::ram_storage_of(blocks), backend, {}}), refused);
  CHECK_THROWS_WITH((MlpStreamer{blocks, bs::ram_storage_of(std::vector<MlpBlock>{}), backend, {}}),
                    refused);
}

TEST_CASE(
    "b28 a parameter shared within a block and across blocks trains once, with the sum of its "
    "gradients") {
  auto reference = make_tied();
  const auto run = [](auto&& forward) {
    for (std::uint64_t i = 0; i < 2; ++i) forward(batch(i)).square().sum().backward();
  };
  run([&](const at::Tensor& x) { return support::resident(reference, x); });
  for (const auto mode : modes) {
    auto modules = make_tied();
    std::vector<bs::ModuleBlock<TiedImpl>> blocks{modules.begin(), modules.end()};
    CHECK(blocks[1].weight_specs().size() == 2);
    auto storage = bs::ram_storage_of(blocks);
    CHECK(storage.regions()[0].size() < (2 * 144 + 4 * 12 + 400) * sizeof(float));
    bs::Streamer streamer{blocks, std::move(storage), bs::HostBackend{mode}, train_options(1)};
    streamer.train();
    const auto parameters = streamer.parameters();
    REQUIRE(parameters.size() == 6);  // two weights, four biases
    run([&](const at::Tensor& x) { return streamer.forward(x); });
    for (std::size_t i = 0; i < modules.size(); ++i) {
      CHECK(same_bits(modules[i]->own.grad(), reference[i]->own.grad()));
      // Uses within a block are summed first, then over blocks: another order than the resident's.
      CHECK(modules[i]->first.grad().allclose(reference[i]->first.grad(), 1e-5, 1e-5));
    }
    CHECK(same_bits(modules[0]->first.grad(), reference[0]->first.grad()));
  }
}

TEST_CASE("a parameter that blocks share once each has the resident run's bits") {
  const auto weight = at::randn({12, 12}, at::detail::createCPUGenerator(5)) * 0.3;
  using Block = bs::FunctionBlock<>;
  const auto gradient = [&](const at::Tensor& shared, auto&& run) {
    run([](const at::Tensor& w, const at::Tensor& x) { return at::tanh(at::linear(x, w)); });
    return shared.grad();
  };
  const auto resident_weight = weight.clone().set_requires_grad(true);
  const auto expected = gradient(resident_weight, [&](auto&& layer) {
    at::Tensor x = batch();
    for (int i = 0; i < 4; ++i) x = layer(resident_weight, x);
    x.sum().backward();
  });
  for (const auto mode : modes) {
    const auto shared = weight.clone().set_requires_grad(true);
    const auto streamed = gradient(shared, [&](auto&& layer) {
      std::vector<Block> blocks;
      for (int i = 0; i < 4; ++i)
        blocks.emplace_back(std::vector<bs::NamedTensor>{{"w", shared}},
                            [layer](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
                              return layer(w[0], x);
                            });
      bs::Streamer streamer{blocks, bs::ram_storage_of(blocks), bs::HostBackend{mode}};
      streamer.train().forward(batch()).sum().backward();
    });
    CHECK(same_bits(streamed, expected));
  }
}

TEST_CASE("frozen and unused parameters have no gradient, the others the resident run's") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    for (auto* list : {&modules, &reference}) {
      (*list)[0]->up->weight.set_requires_grad(false);
      for (auto& parameter : (*list)[2]->parameters()) parameter.set_requires_grad(false);
    }
    auto streamer = stream(modules, mode);
    CHECK(streamer.parameters().size() == 5 * 4 - 5);
    support::resident(reference, batch()).sum().backward();
    streamer.forward(batch()).sum().backward();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
    CHECK_FALSE(modules[1]->unused.grad().defined());
    CHECK_FALSE(modules[0]->up->weight.grad().defined());
    // unfrozen later
    for (auto* list : {&modules, &reference}) (*list)[0]->up->weight.set_requires_grad(true);
    support::resident(reference, batch(3)).sum().backward();
    streamer.forward(batch(3)).sum().backward();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
  }
}

TEST_CASE("b87 gradients accumulate over several forwards, in any order, and dropped ones") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    auto streamer = stream(modules, mode);
    const auto run = [](auto&& forward) {
      auto a = forward(batch(1)), b = forward(batch(2));
      (void)forward(batch(3));
      b.sum().backward();
      a.square().sum().backward();
      forward(batch(4)).sum().backward();
    };
    run([&](const at::Tensor& x) { return streamer.forward(x); });
    run([&](const at::Tensor& x) { return support::resident(reference, x); });
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
  }
}

TEST_CASE("a .grad that the caller keeps is not written again; one let go of is used again") {
  auto modules = make_mlps(), reference = make_mlps();
  auto streamer = stream(modules, bs::HostMode::detached);
  const auto weight = modules[1]->up->weight;
  const auto clear = [&] {
    for (const auto& parameter : parameters_of(modules)) parameter.mutable_grad() = at::Tensor{};
  };
  streamer.forward(batch(1)).sum().backward();
  const void* const first = weight.grad().const_data_ptr();
  const auto kept = weight.grad(), bits = kept.clone();
  clear();
  streamer.forward(batch(2)).sum().backward();
  CHECK(weight.grad().const_data_ptr() != first);
  CHECK(same_bits(kept, bits));
  support::resident(reference, batch(2)).sum().backward();
  CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
  const void* const other = modules[2]->up->weight.grad().const_data_ptr();
  clear();
  streamer.forward(batch(2)).sum().backward();
  CHECK(modules[2]->up->weight.grad().const_data_ptr() == other);
  at::Tensor outlives;
  {
    auto another = stream(make_mlps(), bs::HostMode::detached);
    another.forward(batch(1)).sum().backward();
    outlives = another.parameters()[1].grad();  // the first is never used
  }
  CHECK(outlives.isfinite().all().item<bool>());
}

TEST_CASE("the device holds two places of the largest block's gradients, and counts what leaves") {
  std::uint64_t largest = 0, all = 0;
  auto modules = make_mlps();
  for (const auto& module : modules) {
    std::uint64_t block = 0;
    for (const auto& [name, tensor] : MlpBlock{module}.masters())
      block = bs::round_up(block, bs::tensor_alignment) + tensor.nbytes();
    largest = std::max(largest, bs::round_up(block, bs::tensor_alignment));
    for (const auto& parameter : module->parameters())
      all += parameter.is_same(module->unused) ? 0 : parameter.nbytes();
  }
  auto streamer = stream(modules, bs::HostMode::detached);
  CHECK(streamer.gradient_byte_count() == 0);
  for (std::uint64_t i = 1; i <= 2; ++i) {
    streamer.forward(batch()).sum().backward();
    CHECK(streamer.gradient_byte_count() == 2 * largest);
    CHECK(streamer.statistics().bytes_copied_out == i * all);
    CHECK(streamer.statistics().peak_resident_blocks <= 2);
  }
  auto attached = stream(make_mlps(), bs::HostMode::attached);
  attached.forward(batch()).sum().backward();
  CHECK(attached.gradient_byte_count() == 0);
}

TEST_CASE(
    "b86 what was cached or prefetched before a change of masters is fetched again after it") {
  for (const auto mode : modes) {
    for (const bool unseen : {false, true}) {
      auto modules = make_mlps(), reference = make_mlps();
      auto streamer = stream(modules, mode, 2, /*cached=*/true);
      for (int i = 0; i < 3; ++i) {
        {
          const c10::NoGradGuard no_grad;
          for (auto* list : {&modules, &reference}) {
            for (auto& module : *list) {
              // LibTorch's SGD writes through data(), which bumps no version
              unseen ? module->up->weight.data().mul_(1.25) : module->up->weight.mul_(1.25);
            }
          }
          CHECK(same_bits(streamer.forward(batch()), support::resident(reference, batch())));
        }
        support::resident(reference, batch()).sum().backward();
        streamer.forward(batch()).sum().backward();
        CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
      }
    }
    // a buffer, and a frozen parameter: their versions tell
    auto modules = make_mlps(), reference = make_mlps();
    for (const auto& parameter : parameters_of(modules)) parameter.set_requires_grad(false);
    auto streamer = stream(modules, mode, 2, /*cached=*/true);
    (void)streamer.forward(batch());
    const auto fetches = streamer.statistics().fetches;
    (void)streamer.forward(batch());
    CHECK(streamer.statistics().fetches < fetches + 5);  // frozen: what is cached stays
    for (auto* list : {&modules, &reference}) (*list)[4]->scale.fill_(2);
    CHECK(same_bits(streamer.forward(batch()), support::resident(reference, batch())));
  }
}

TEST_CASE("b93 masters changed between a forward and its backward are an error that names them") {
  for (const auto mode : modes) {
    auto modules = make_mlps();
    auto streamer = stream(modules, mode);
    auto output = streamer.forward(batch()).sum();
    {
      const c10::NoGradGuard no_grad;
      modules[3]->down->weight.add_(1);
    }
    CHECK_THROWS_WITH(output.backward(), ContainsSubstring("block 3, down.weight") &&
                                             ContainsSubstring("between forward and backward"));
    output = streamer.forward(batch()).sum();
    modules[1]->scale.fill_(3);
    CHECK_THROWS_WITH(output.backward(), ContainsSubstring("block 1, scale"));
    streamer.forward(batch()).sum().backward();  // and afterwards all is well
    CHECK(modules[0]->up->weight.grad().defined());
    modules[2]->to(at::kDouble);
    CHECK_THROWS_WITH(streamer.forward(batch()),
                      ContainsSubstring("block 2") && ContainsSubstring("new memory"));
  }
}

TEST_CASE("a training graph outlives a streamer that was moved or destroyed; so do the masters") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    at::Tensor output;
    {
      auto streamer = stream(modules, mode);
      auto moved = std::make_unique<MlpStreamer>(std::move(streamer));
      output = moved->forward(batch());
    }
    output.sum().backward();
    support::resident(reference, batch()).sum().backward();
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
    CHECK(support::same_values(parameters_of(modules), parameters_of(reference)));
  }
}

TEST_CASE("autograd::grad, hooks and backward over chosen inputs see masters as any other leaf") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    auto streamer = stream(modules, mode);
    const auto grads = [&](const std::vector<Mlp>& list, const at::Tensor& output) {
      return torch::autograd::grad({output.sum()}, {list[1]->up->weight, list[4]->down->weight});
    };
    const auto got = grads(modules, streamer.forward(batch()));
    CHECK(support::same_values(got, grads(reference, support::resident(reference, batch()))));
    for (const auto& parameter : parameters_of(modules)) CHECK_FALSE(parameter.grad().defined());
    int calls = 0;
    modules[2]->up->weight.register_hook([&calls](const at::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
    streamer.forward(batch()).sum().backward();
    support::resident(reference, batch()).sum().backward();
    CHECK(calls == 1);
    CHECK(same_bits(modules[2]->up->weight.grad(), reference[2]->up->weight.grad() * 2));
    CHECK(same_bits(modules[3]->up->weight.grad(), reference[3]->up->weight.grad()));
    auto x = batch().set_requires_grad(true);
    for (const auto& parameter : parameters_of(modules)) parameter.mutable_grad() = at::Tensor{};
    streamer.forward(x).sum().backward({}, std::nullopt, false,
                                       std::vector<at::Tensor>{x, modules[0]->up->bias});
    CHECK(x.grad().defined());
    CHECK(modules[0]->up->bias.grad().defined());
    CHECK_FALSE(modules[3]->up->weight.grad().defined());
  }
}

TEST_CASE("b84 b87 a master used outside of the streamer too has the sum of both gradients") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    auto streamer = stream(modules, mode);
    const auto loss = [](const std::vector<Mlp>& list, auto&& forward) {
      const auto& tied = list[0]->up->weight;  // (inner,width)
      const auto x = at::linear(at::linear(batch(), tied), tied.t());
      return at::linear(forward(x), tied).square().sum();
    };
    loss(reference, [&](const at::Tensor& x) {
      return support::resident(reference, x);
    }).backward();
    loss(modules, [&](const at::Tensor& x) { return streamer.forward(x); }).backward();
    const auto a = modules[0]->up->weight.grad(), b = reference[0]->up->weight.grad();
    CHECK(a.allclose(b, 1e-5, 1e-5));  // the order of the sum differs
    CHECK(same_bits(modules[1]->up->weight.grad(), reference[1]->up->weight.grad()));
  }
}

TEST_CASE("computing in bf16 over fp32 masters gives fp32 gradients of the bf16 computation") {
  for (const auto mode : modes) {
    auto modules = make_mlps(), reference = make_mlps();
    auto blocks = support::blocks_of(modules);
    auto options = train_options(1);
    options.dtype = bs::DType::bf16;
    bs::Streamer streamer{blocks, bs::ram_storage_of(blocks), bs::HostBackend{mode}, options};
    const auto x = batch().to(at::kBFloat16);
    streamer.train().forward(x).sum().backward();
    at::Tensor y = x;
    for (auto& m : reference) {
      const auto low = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
      const auto h = at::gelu(at::linear(y, low(m->up->weight), low(m->up->bias)));
      y = y + at::linear(h, low(m->down->weight)) * low(m->scale);
    }
    y.sum().backward();
    CHECK(modules[0]->up->weight.grad().scalar_type() == at::kFloat);
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
  }
}

TEST_CASE("dropout draws the same in the recompute; the streamer's mode is the module's") {
  for (const auto mode : modes) {
    auto modules = make_mlps(4, 0.5), reference = make_mlps(4, 0.5);
    auto streamer = stream(modules, mode);
    at::manual_seed(11);
    support::resident(reference, batch()).sum().backward();
    const auto after = at::rand({2});
    at::manual_seed(11);
    streamer.forward(batch()).sum().backward();
    CHECK(same_bits(at::rand({2}), after));
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
    const c10::NoGradGuard no_grad;
    for (auto& module : reference) module->eval();
    CHECK(same_bits(streamer.eval().forward(batch()), support::resident(reference, batch())));
    CHECK_FALSE(modules[0]->is_training());
  }
}

TEST_CASE("modules, functions and blocks without parameters make one list") {
  using Any = bs::AnyBlock<at::Tensor, bs::NoContext>;
  const auto gain = [] { return at::full({12}, 0.9).set_requires_grad(true); };
  const auto scaled = [](const bs::Weights& w, const at::Tensor& x, bs::NoContext&) {
    return x * w[0];
  };
  for (const auto mode : modes) {
    auto modules = make_mlps(2), reference = make_mlps(2);
    const auto ours = gain(), theirs = gain();
    std::vector<Any> blocks;
    blocks.emplace_back(bs::FunctionBlock<>{[](const at::Tensor& x) { return at::tanh(x); }});
    blocks.emplace_back(MlpBlock{modules[0]});
    blocks.emplace_back(bs::FunctionBlock<>{{{"gain", ours}}, scaled});
    blocks.emplace_back(MlpBlock{modules[1]});
    auto storage = bs::ram_storage_of(blocks);
    bs::Streamer streamer{std::move(blocks), std::move(storage), bs::HostBackend{mode}};
    auto x = batch().set_requires_grad(true), y = batch().set_requires_grad(true);
    streamer.train().forward(x).sum().backward();
    (reference[1]->forward(reference[0]->forward(at::tanh(y)) * theirs)).sum().backward();
    CHECK(same_bits(x.grad(), y.grad()));
    CHECK(same_bits(ours.grad(), theirs.grad()));
    CHECK(support::same_gradients(parameters_of(modules), parameters_of(reference)));
  }
}

TEST_CASE("what cannot be a master is refused by name") {
  const auto of = [](std::vector<bs::NamedTensor> tensors) {
    const std::vector<std::vector<bs::NamedTensor>> blocks{{}, std::move(tensors)};
    return bs::MasterStorage{blocks};
  };
  const auto whole = at::zeros({4, 3});
  CHECK_THROWS_WITH(of({{"w", whole[1]}}),
                    ContainsSubstring("block 1, w") && ContainsSubstring("storage"));
  CHECK_THROWS_WITH(of({{"w", whole.t()}}),
                    ContainsSubstring("block 1, w") && ContainsSubstring("contiguous"));
  CHECK_THROWS_WITH(of({{"w", at::empty({2}, at::TensorOptions{}.device(at::kMeta))}}),
                    ContainsSubstring("block 1, w") && ContainsSubstring("meta"));
  CHECK_THROWS_WITH(of({{"w", at::eye(3).to_sparse()}}), ContainsSubstring("sparse"));
  CHECK_THROWS_WITH(
      of({{"v", whole}, {"w", whole.view({3, 4})}}),
      ContainsSubstring("block 1, w and block 1, v") && ContainsSubstring("one storage"));
  CHECK_THROWS_WITH(of({{"w", at::Tensor{}}}), ContainsSubstring("undefined"));
  const auto leaf = at::zeros({2}).set_requires_grad(true);
  CHECK_THROWS_WITH(of({{"w", leaf * 2}}), ContainsSubstring("leaf"));
  CHECK_NOTHROW(of({{"w", at::empty({0, 3})}, {"s", at::scalar_tensor(3.0)}}));
  // views that the caller holds follow the tensor to its new memory
  const auto view = whole.view({12});
  const auto storage = of({{"w", whole}});
  whole.fill_(3);
  CHECK(view.sum().item<float>() == 36);
  CHECK(*reinterpret_cast<const float*>(storage.bytes(bs::BlockId{1}).data()) == 3);
}

TEST_CASE("b81 running statistics in training are refused by the tensor's name, and eval() helps") {
  struct NormImpl : torch::nn::Module {
    NormImpl() { register_module("norm", norm); }
    at::Tensor forward(const at::Tensor& x) { return norm->forward(x); }
    torch::nn::BatchNorm1d norm{support::width};
  };
  for (const auto mode : modes) {
    const auto module = std::make_shared<NormImpl>();
    std::vector<bs::ModuleBlock<NormImpl>> blocks{bs::ModuleBlock<NormImpl>{module}};
    bs::Streamer streamer{blocks, bs::ram_storage_of(blocks), bs::HostBackend{mode}};
    streamer.train();
    for (int i = 0; i < 2; ++i)
      CHECK_THROWS_WITH(streamer.forward(batch()), ContainsSubstring("norm.num_batches_tracked"));
    module->norm->eval();
    streamer.forward(batch()).sum().backward();
    CHECK(module->norm->weight.grad().defined());
    CHECK(module->norm->running_mean.abs().sum().item<float>() == 0);
  }
}
