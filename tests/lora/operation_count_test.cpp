// SPDX-License-Identifier: Apache-2.0
// A step over a fast link waits for the host, which pays for every operation and node of a block.
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/decoder_block.hpp>
#include <block_streamer/train/backward_pass.hpp>

#include <ATen/ops/arange.h>
#include <ATen/record_function.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

/// What ran on this thread since its making, by name.
class Census {
 public:
  Census() {
    running() = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&Census::begins)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  Census(const Census&) = delete;
  Census& operator=(const Census&) = delete;
  ~Census() {
    at::removeCallback(handle_);
    running() = nullptr;
  }

  /// Operations, those inside others included, without the CPU's look at conjugate bits.
  [[nodiscard]] int operations() const {
    int count = 0;
    for (const auto& [name, times] : operations_) {
      if (name.starts_with("aten::") && name != "aten::resolve_conj") count += times;
    }
    return count;
  }
  [[nodiscard]] int operations(const std::string& name) const {
    return operations_.contains(name) ? operations_.at(name) : 0;
  }
  [[nodiscard]] int nodes() const {
    int count = 0;
    for (const auto& [name, times] : nodes_) count += times;
    return count;
  }

 private:
  static Census*& running() {
    thread_local Census* census = nullptr;
    return census;
  }
  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
    Census& census = *running();
    const bool is_node = function.scope() == at::RecordScope::BACKWARD_FUNCTION;
    ++(is_node ? census.nodes_ : census.operations_)[function.name()];
    return nullptr;
  }

  at::CallbackHandle handle_{};
  std::map<std::string, int> operations_;
  std::map<std::string, int> nodes_;
};

bs::ModelConfig small_qwen3() {
  bs::ModelConfig config;
  config.path = "small";
  config.model_type = "qwen3";
  config.head_dim = 8;
  config.rms_norm_eps = 1e-6;
  config.rope.type = "default";
  config.rope.theta = 1e4;
  config.max_position = 64;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.head_count = 4;
  config.kv_head_count = 2;
  config.layer_count = 1;
  return config;
}

at::Tensor small_waves(const std::vector<std::int64_t>& sizes, double seed) {
  const at::Tensor i = at::arange(c10::multiply_integers(sizes), at::kDouble);
  return (i * (1.7 + seed)).sin().mul(0.3).to(at::kFloat).view(sizes);
}

/// A list of one block whose adapters train, as pull_back asks for it.
struct OneBlock {
  using Context = bs::models::DecoderContext;
  std::vector<at::Tensor> parameters;

  [[nodiscard]] const OneBlock& blocks() const { return *this; }
  [[nodiscard]] std::vector<bs::TrainedWeight> trained() const { return {}; }
  [[nodiscard]] std::span<const at::Tensor> adapter_parameters(std::size_t) const {
    return parameters;
  }
  [[nodiscard]] at::Device device() const { return at::kCPU; }
  [[nodiscard]] std::shared_ptr<void> replay_random(bs::BlockId,
                                                    const std::optional<bs::RngState>& then) const {
    return std::make_shared<bs::RngScope>(then.value());
  }
};

}  // namespace

TEST_CASE("recompute and backward of a block with seven adapters take few operations and nodes") {
  const bs::models::DecoderBlock block{small_qwen3(), 0};
  std::vector<at::Tensor> weights;
  for (const bs::WeightSpec& spec : block.weight_specs())
    weights.push_back(small_waves({spec.shape.begin(), spec.shape.end()}, 0.01 * weights.size()));
  const std::vector<bs::LoraBlock> list{{"model.layers.0.", block.weight_specs()}};
  const bs::LoraAdapter adapter = bs::make_lora_adapter(list, {.rank = 2}, at::kCPU);
  REQUIRE(adapter.modules().size() == 7);
  const bs::AdapterTable table = adapter.table(list);
  std::vector<const bs::ProjectionAdapter*> woven;
  for (const auto& one : table.blocks[0].by_weight) woven.push_back(one.get());
  const auto run_block = [&](const at::Tensor& hidden, auto& context, bool training,
                             std::vector<at::Tensor>*) {
    return block.forward(bs::Weights{weights, woven, training}, hidden, context);
  };
  auto context = bs::models::make_context(1, 5, bs::rotary_frequencies(8, 1e4), at::kFloat);
  const at::Tensor input = small_waves({1, 5, 24}, 0.5), gradient = small_waves({1, 5, 24}, 0.6);
  bs::SavedContext saved{context};
  const std::optional<bs::RngState> random = bs::RngState::capture(at::kCPU);
  const bs::AutocastState autocast = bs::AutocastState::capture(at::kCPU);
  OneBlock run{table.blocks[0].parameters};
  const auto pull = [&] {
    return bs::detail::pull_back(run, bs::BlockId{}, run_block,
                                 {input, /*input_needed=*/true, random, autocast, {&gradient, 1}},
                                 saved);
  };
  const auto pulled = pull();  // also what is done only once
  REQUIRE(pulled.input.defined());
  for (const at::Tensor& one : pulled.adapters) REQUIRE(one.defined());
  const Census census;
  (void)pull();
  const int products = census.operations("aten::mm") + census.operations("aten::addmm") +
                       census.operations("aten::addmm_");
  INFO(census.operations() << " operations, " << census.nodes() << " nodes");
  CHECK(products == 56);  // as many as the formulas have
  CHECK(census.operations() <= 400);
  CHECK(census.nodes() <= 20);
}
