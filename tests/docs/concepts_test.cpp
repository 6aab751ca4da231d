// SPDX-License-Identifier: Apache-2.0
// What docs/concepts.md and README.md show, run. The text between two marks stands there word for
// word (snippets_test.py).
#include <ATen/ATen.h>

#include <block_streamer/block/any_block.hpp>
#include <block_streamer/block/function_block.hpp>
#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/block/module_block.hpp>
#include <block_streamer/block/projection.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/lora/peft_loading.hpp>
#include <block_streamer/models/llama.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/pooled.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/streamer.hpp>
#include <block_streamer/trace/perfetto_writer.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <support/catch.hpp>
#include <support/safetensors_files.hpp>

namespace bs = block_streamer;

namespace {

// [block]
struct Mlp {  // x + W2·relu(W1·x)
  using Hidden = at::Tensor;
  struct Context {};  // what all blocks of a pass share: positions, masks, a KV cache; here nothing
  std::uint64_t width = 8, inner = 32;

  std::vector<bs::WeightSpec> weight_specs() const {
    return {{"up.weight", {inner, width}, /*projection=*/true},
            {"down.weight", {width, inner}, /*projection=*/true}};
  }
  at::Tensor forward(const bs::Weights& weights, const at::Tensor& x, Context&) {
    const at::Tensor h = at::relu(bs::project(weights, 0, x));  // (B,inner)
    return x + bs::project(weights, 1, h);                      // (B,width)
  }
};
static_assert(bs::streamable_block<Mlp>);
// [/block]

// [reader]
struct HeldInMemory {  // or fetched over a network, decompressed, made up
  bs::BlockMap map;    // says which bytes of which file a block is
  std::vector<std::vector<std::byte>> images;

  std::size_t block_count() const noexcept { return images.size(); }
  const bs::BlockImage& image(bs::BlockId block) const noexcept {
    return map.blocks()[bs::index_of(block)].image;
  }
  std::error_code read(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out) {
    const auto& bytes = images[bs::index_of(block)];
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(range.offset), out.size(), out.begin());
    return {};  // all of `out` is filled, or an error says why not
  }
};
static_assert(bs::storage_tier<bs::Pooled<HeldInMemory>>);
// [/reader]

// [finisher]
struct Unmask final : bs::Finisher<bs::HostBackend> {  // stored bytes are masked; unmask on arrival
  std::uint64_t byte_count;
  explicit Unmask(std::uint64_t bytes_of_a_block) : byte_count{bytes_of_a_block} {}
  std::uint64_t bound_byte_count(bs::PartId) const override { return byte_count; }
  void enqueue(bs::PartId, std::span<const std::byte> wire, std::span<std::byte> bound,
               bs::HostBackend::Stream&) override {
    std::transform(wire.begin(), wire.end(), bound.begin(),
                   [](std::byte b) { return b ^ std::byte{0x5A}; });
  }
};
// [/finisher]

// [observer]
struct MostResident {
  int now = 0, most = 0;
  void observe(const bs::Transition& t) noexcept {
    if (t.from == bs::Residency::empty) most = std::max(most, ++now);
    if (t.to == bs::Residency::empty) --now;
  }
};
static_assert(bs::residency_observer<MostResident>);
// [/observer]

/// Four blocks in a file.
struct Stored {
  Stored() {
    std::vector<at::Tensor> kept;
    std::vector<bs::TensorBytes> tensors;
    for (int i = 0; i < 4; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      for (const auto& spec : Mlp{}.weight_specs()) {
        kept.push_back(at::randn(bs::sizes_of(spec.shape)) * 0.1);
        tensors.push_back(
            {{prefix + spec.name, bs::DType::f32, spec.shape}, bs::bytes_of(kept.back())});
      }
    }
    bs::write_safetensors(folder / "model.safetensors", tensors, {});
  }
  support::TempFolder folder;
};

bs::BlockMap map_of(const std::filesystem::path& folder) {
  // [map]
  const auto checkpoint = bs::Checkpoint::open(folder);  // headers only, every byte range checked
  std::vector<bs::BlockTensors> names;
  for (int i = 0; i < 4; ++i) {
    names.push_back({"layers." + std::to_string(i) + ".", {"up.weight", "down.weight"}});
  }
  bs::BlockMap map = bs::make_block_map(checkpoint, names);
  // [/map]
  return map;
}

at::Tensor expected(const bs::BlockMap& map, const at::Tensor& x) {
  bs::Streamer streamer{std::vector<Mlp>(4), bs::RamStorage::load(map), bs::HostBackend{}};
  return streamer.forward(x, Mlp::Context{});
}

}  // namespace

TEST_CASE("a list of blocks streams from every tier") {
  const Stored stored;
  const bs::BlockMap map = map_of(stored.folder.path());
  const at::Tensor x = at::randn({3, 8});
  const at::Tensor want = expected(map, x);
  {
    // [streamer]
    std::vector<Mlp> blocks(4);
    bs::Streamer streamer{blocks, bs::FileStorage{map}, bs::HostBackend{}, {.prefetch_ahead = 1}};
    at::Tensor y = streamer.forward(x, Mlp::Context{});  // at most 2 of the 4 are resident
    // [/streamer]
    CHECK(at::equal(y, want));
    CHECK(streamer.statistics().peak_resident_blocks == 2);
  }
  std::ifstream in{stored.folder / "model.safetensors", std::ios::binary};
  const std::string file{std::istreambuf_iterator<char>{in}, {}};
  HeldInMemory reader{map, {}};
  const bs::FileStorage plain{map};
  for (std::size_t b = 0; b < 4; ++b) {
    const bs::BlockImage& image = plain.image(bs::block_at(b));
    std::vector<std::byte> bytes(image.byte_count);
    bs::ExtentReader<bs::PositionalFile> whole{map};
    REQUIRE_FALSE(whole.read(bs::block_at(b), {0, image.byte_count}, bytes));
    reader.images.push_back(std::move(bytes));
  }
  // [pooled]
  bs::Pooled tier{std::move(reader), /*threads=*/4};
  // [/pooled]
  bs::Streamer streamer{std::vector<Mlp>(4), std::move(tier), bs::HostBackend{}};
  CHECK(at::equal(streamer.forward(x, Mlp::Context{}), want));
}

TEST_CASE("modules and functions share a list") {
  // [any_block]
  std::vector<bs::AnyBlock<at::Tensor, bs::NoContext>> mixed;  // NoContext: nothing is shared
  torch::nn::Linear map{8, 8};
  mixed.emplace_back(bs::ModuleBlock{map});
  mixed.emplace_back(bs::FunctionBlock<>{
      {}, [](const bs::Weights&, const at::Tensor& x, bs::NoContext&) { return at::gelu(x); }});
  auto masters = bs::ram_storage_of(mixed);  // first: the list is moved away
  bs::Streamer over_mixed{
      std::move(mixed), std::move(masters), bs::HostBackend{}, {.prefetch_ahead = 1}};
  // [/any_block]
  const at::Tensor x = at::randn({3, 8});
  CHECK(at::equal(over_mixed.forward(x), at::gelu(map->forward(x))));
}

TEST_CASE("an adapter trains with an ordinary backward, and its files are PEFT's") {
  const Stored stored;
  const bs::BlockMap map = map_of(stored.folder.path());
  const at::Tensor x = at::randn({16, 8}), target = at::randn({16, 8});
  const std::vector<Mlp> blocks(4);
  bs::Streamer streamer{blocks, bs::FileStorage{map}, bs::HostBackend{}};
  // [optimizer]
  std::vector<bs::LoraBlock> sites;
  for (int i = 0; i < 4; ++i) {
    sites.push_back({"layers." + std::to_string(i) + ".", blocks[0].weight_specs()});
  }
  auto adapter = bs::make_lora_adapter(sites, {.rank = 4}, at::kCPU);
  streamer.attach(adapter.table(sites));

  std::vector<at::Tensor> parameters = streamer.parameters();  // the adapter's; nothing else trains
  bs::AdamW adamw;
  for (std::uint64_t step = 1; step <= 20; ++step) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor{};
    at::Tensor loss = at::mse_loss(streamer.train().forward(x, Mlp::Context{}), target);
    loss.backward();  // fetches the blocks again, in reverse
    adamw.step(parameters, {.step = step, .learning_rate = 1e-2});
  }
  // [/optimizer]
  const auto loss_now = [&] {
    return at::mse_loss(streamer.eval().forward(x, Mlp::Context{}), target).item<double>();
  };
  const double trained = loss_now();
  streamer.attach({});
  CHECK(trained < loss_now());
}

TEST_CASE("a finisher changes what arrived") {
  const Stored stored;
  const bs::BlockMap map = map_of(stored.folder.path());
  const std::uint64_t size = map.blocks()[0].image.layout.slot_byte_count[0];
  // [pipeline]
  bs::HostBackend backend;
  auto compute = backend.make_stream();
  bs::BlockPipeline<bs::HostBackend> pipeline{
      bs::FileStorage{map}, backend, {}, std::make_unique<Unmask>(size)};
  auto pass = pipeline.begin_pass(bs::ascending(0, 4), {}, compute);
  while (!pass.done()) {
    auto lease = pass.acquire();                   // waits for the block's bytes
    std::span<std::byte> weights = lease.bytes();  // unmasked; until the lease ends
    // [/pipeline]
    CHECK(weights.size() == size);
    // [pipeline]
  }
  // [/pipeline]
}

TEST_CASE("a pass can be watched") {
  const Stored stored;
  const bs::BlockMap map = map_of(stored.folder.path());
  const at::Tensor x = at::randn({3, 8});
  const auto path = stored.folder / "trace.json";
  {
    // [watch]
    MostResident count;
    bs::PerfettoWriter timeline;
    bs::StreamerOptions options;
    options.observer = count;  // not owned: it outlives the streamer
    options.trace = timeline;
    bs::Streamer streamer{std::vector<Mlp>(4), bs::FileStorage{map}, bs::HostBackend{}, options};
    (void)streamer.forward(x, Mlp::Context{});
    streamer.drain();
    timeline.write_to(path);  // for ui.perfetto.dev
    const std::uint64_t read =
        streamer.statistics().bytes_read;  // definitions: trace/statistics.hpp
    // [/watch]
    CHECK(count.most == 2);
    CHECK(read > 0);
  }
  CHECK(std::filesystem::file_size(path) > 100);
}

TEST_CASE("a checkpoint is run and trained as the README says") {
  const std::string folder = std::string{BLOCK_STREAMER_TEST_FIXTURES} + "/models/llama_gqa";
  const at::Tensor ids = at::arange(1, 13).reshape({1, 12});
  auto checkpoint = bs::Checkpoint::open(folder);  // headers only, every byte range checked
  auto model = bs::models::Llama{checkpoint};      // block list + resident embedding, norm, head
  bs::Streamer streamer{
      model.blocks(), bs::FileStorage{model.block_map()}, bs::HostBackend{}, {.prefetch_ahead = 1}};
  at::Tensor hidden = streamer.forward(model.embed(ids), model.context(ids));  // (B,T,C)
  at::Tensor logits = model.logits(hidden);                                    // (B,T,V)
  CHECK(logits.size(1) == 12);
  const support::TempFolder output;
  std::vector<double> losses;
  // [readme-train]
  auto sites = bs::lora_blocks_of<bs::models::LlamaBlock>(model.blocks(), model.layout().blocks);
  auto adapter = bs::make_lora_adapter(sites, {.rank = 16, .alpha = 32}, model.device());
  streamer.attach(adapter.table(sites));  // the base is frozen: only the adapter trains
  std::vector<at::Tensor> parameters = streamer.parameters();
  bs::AdamW adamw;
  for (std::uint64_t step = 1; step <= 10; ++step) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor{};
    at::Tensor x = streamer.train().forward(model.embed(ids), model.context(ids));
    const bs::TokenLoss loss = bs::token_loss(model.logits(x), ids, at::ones_like(ids, at::kBool));
    const at::Tensor mean = loss.sum / static_cast<double>(loss.count);
    mean.backward();  // fetches the blocks again, in reverse
    adamw.step(parameters, {.step = step, .learning_rate = 2e-4});
    // [/readme-train]
    losses.push_back(loss.sum.item<double>());
    // [readme-train]
  }
  bs::save_adapter(output / "adapter", adapter, "my-base-model");  // in PEFT's format
  // [/readme-train]
  CHECK(losses.back() < losses.front());
}
