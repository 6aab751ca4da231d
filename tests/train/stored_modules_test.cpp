// SPDX-License-Identifier: Apache-2.0
// Modules without memory of their own, bound by name to files.
#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/block/module_block.hpp>
#include <block_streamer/block/stored_blocks.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <torch/nn/modules/linear.h>

#include <cstring>
#include <fstream>
#include <string>

#include <support/catch.hpp>
#include <support/safetensors_files.hpp>

#if defined(__linux__)
#include <malloc.h>
#include <sys/resource.h>
#endif

namespace bs = block_streamer;

namespace {

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(std::int64_t width) : linear{width, width} {
    register_module("linear", linear);
    steps = register_buffer("steps", torch::zeros({2}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) { return x + at::tanh(linear->forward(x)); }
  torch::nn::Linear linear;
  at::Tensor steps;
};
TORCH_MODULE(Layer);
using StoredBlock = bs::ModuleBlock<Layer>;

/// One at a time, so that no more than one is ever in memory.
std::vector<StoredBlock> make_blocks(std::size_t count, std::int64_t width) {
  std::vector<StoredBlock> blocks;
  for (std::size_t i = 0; i < count; ++i) {
    Layer layer{width};
    bs::to_meta(*layer);
    blocks.emplace_back(layer);
  }
  return blocks;
}

at::Tensor values(std::int64_t width, std::uint64_t seed) {
  return at::randn({width, width}, at::detail::createCPUGenerator(seed)) * 0.05;
}

/// Layers as a file has them, without more than one in memory. @param change  of the file's
/// tensors.
template <class Change>
void write_layers(const std::filesystem::path& path, std::size_t count, std::int64_t width,
                  Change&& change) {
  std::vector<bs::TensorSpec> specs;
  const auto w = static_cast<std::uint64_t>(width);
  for (std::size_t i = 0; i < count; ++i) {
    const std::string prefix = "net.layers." + std::to_string(i) + ".";
    specs.push_back({prefix + "linear.weight", bs::DType::f32, {w, w}});
    specs.push_back({prefix + "linear.bias", bs::DType::f32, {w}});
    specs.push_back({prefix + "steps", bs::DType::i64, {2}});
  }
  specs.push_back({"net.head", bs::DType::f32, {3}});  // not of a layer
  change(specs);
  bs::SafetensorsStream stream{path, specs};
  for (const std::size_t t : stream.order()) {
    const auto& spec = specs[t];
    at::Tensor bytes = at::zeros(
        {static_cast<std::int64_t>(*bs::dense_byte_count(spec.dtype, spec.shape))}, at::kByte);
    if (spec.name.ends_with("linear.weight") && spec.dtype == bs::DType::f32)
      bytes = values(width, t).view({-1}).view(at::kByte);
    stream.append(bs::bytes_of(bytes));
  }
  stream.commit();
}
void write_layers(const std::filesystem::path& path, std::size_t count, std::int64_t width) {
  write_layers(path, count, width, [](auto&) {});
}

at::Tensor resident(std::size_t count, std::int64_t width, at::Tensor x) {
  for (std::size_t i = 0; i < count; ++i)
    x = x + at::tanh(at::linear(x, values(width, 3 * i), at::zeros({width})));
  return x;
}

bs::AnyStorage storage_of(const bs::BlockMap& map, const std::string& tier) {
  if (tier == "ram") return bs::RamStorage::load(map);
  if (tier == "mapped") return bs::MappedStorage{map};
  return bs::FileStorage{map, 2};
}

}  // namespace

TEST_CASE("modules on meta run from any tier, and pull gradients to their input") {
  const support::TempFolder folder;
  write_layers(folder / "model.safetensors", 4, 24);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const at::Tensor x = at::randn({5, 24}, at::detail::createCPUGenerator(1));
  const at::Tensor of_x = x.clone().set_requires_grad(true);
  const at::Tensor expected = resident(4, 24, of_x);
  expected.square().sum().backward();
  for (const std::string tier : {"ram", "mapped", "file"}) {
    for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
      auto blocks = make_blocks(4, 24);
      const auto modules = blocks;
      const auto map = bs::stored_blocks(checkpoint, blocks, "net.layers.{}.");
      bs::Streamer streamer{std::move(blocks), storage_of(map, tier), bs::HostBackend{mode}};
      INFO(tier);
      const at::Tensor output = streamer.forward(x);
      CHECK(std::memcmp(output.data_ptr(), expected.data_ptr(), output.nbytes()) == 0);
      const at::Tensor input = x.clone().set_requires_grad(true);
      streamer.train().forward(input).square().sum().backward();
      CHECK(std::memcmp(input.grad().data_ptr(), of_x.grad().data_ptr(), x.nbytes()) == 0);
      for (const auto& module : modules) {
        CHECK(module.module()->linear->weight.is_meta());
        CHECK_FALSE(module.module()->linear->weight.grad().defined());
      }
      CHECK(streamer.parameters().empty());
    }
  }
}

TEST_CASE("tensors of a file that do not fit the modules are named, all of a block at once") {
  const support::TempFolder folder;
  const auto path = folder / "model.safetensors";
  const auto open = [&](std::size_t count = 3, const char* pattern = "net.layers.{}.") {
    return bs::stored_blocks(bs::Checkpoint::open(folder.path()), make_blocks(count, 8), pattern);
  };
  write_layers(path, 3, 8, [](std::vector<bs::TensorSpec>& specs) {
    specs[3].name = "net.layers.1.linear.wait";
    specs[4].shape = {7};
    specs[5].dtype = bs::DType::f32;
  });
  CHECK_THROWS_WITH(open(), ContainsSubstring("block 1") &&
                                ContainsSubstring("linear.weight: missing") &&
                                ContainsSubstring("linear.wait: stored as [8, 8], unknown") &&
                                ContainsSubstring("linear.bias: stored as [7]") &&
                                ContainsSubstring("steps: stored as F32, the block needs I64"));
  write_layers(path, 3, 8, [](auto& specs) { specs[0].dtype = bs::DType::i32; });
  CHECK_THROWS_WITH(open(),
                    ContainsSubstring("block 0") &&
                        ContainsSubstring("linear.weight: stored as I32, the block needs F16"));
  write_layers(path, 3, 8);
  CHECK_NOTHROW(open());
  CHECK_THROWS_WITH(
      open(2), ContainsSubstring("net.layers.2.linear.bias") && ContainsSubstring("only 2 blocks"));
  CHECK_THROWS_WITH(open(4), ContainsSubstring("block 3") && ContainsSubstring("missing"));
  CHECK_THROWS_WITH(open(3, "layers.{}."), ContainsSubstring("missing"));
  CHECK_THROWS_WITH(open(3, "net.layers."), ContainsSubstring("one {}"));
  CHECK_THROWS_WITH(bs::ram_storage_of(make_blocks(1, 8)), ContainsSubstring("meta"));
}

#if defined(__linux__)
TEST_CASE("modules larger than the memory that the process may have run from their file") {
  constexpr std::size_t count = 24;
  constexpr std::int64_t width = 1536;  // 9 MiB a layer, 216 MiB in all
  constexpr std::uint64_t allowed = 96ULL << 20;
#if defined(__GLIBC__)
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);  // what is freed is the system's again
#endif
  const support::TempFolder folder;
  write_layers(folder / "model.safetensors", count, width);
  const at::Tensor x = at::randn({2, width}, at::detail::createCPUGenerator(1));
  const at::Tensor expected = resident(count, width, x);
  std::uint64_t pages = 0, data = 0, ignored = 0;
  std::ifstream statm{"/proc/self/statm"};
  statm >> pages >> ignored >> ignored >> ignored >> ignored >> data;
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_DATA, &before) == 0);
  const rlimit tight{data * 4096 + allowed, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_DATA, &tight) == 0);
  const struct Restore {
    rlimit limit;
    ~Restore() { ::setrlimit(RLIMIT_DATA, &limit); }
  } restore{before};
  auto blocks = make_blocks(count, width);
  const auto map = bs::stored_blocks(bs::Checkpoint::open(folder.path()), blocks, "net.layers.{}.");
  bs::Streamer streamer{std::move(blocks), bs::FileStorage{map, 2}, bs::HostBackend{}};
  const c10::NoGradGuard no_grad;
  const at::Tensor output = streamer.forward(x);
  CHECK(std::memcmp(output.data_ptr(), expected.data_ptr(), output.nbytes()) == 0);
  CHECK(streamer.statistics().peak_resident_blocks == 2);
  std::vector<at::Tensor> weights;
  CHECK_THROWS([&] {  // the limit is one: all layers do not fit
    for (std::size_t i = 0; i < count; ++i) weights.push_back(at::ones({width, width}));
  }());
}
#endif
