// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/finetune/trained_model_files.hpp>
#include <block_streamer/finetune/training_loop.hpp>
#include <block_streamer/finetune/training_state.hpp>
#include <block_streamer/models/decoder_masters.hpp>
#include <block_streamer/models/resident_parameters.hpp>
#include <block_streamer/optim/schedule.hpp>
#include <block_streamer/streamer.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <support/catch.hpp>
#include <support/safetensors_files.hpp>

namespace bs = block_streamer;

namespace {

using FullStreamer = bs::Streamer<bs::models::DecoderBlock, bs::MasterStorage,
                                  bs::ExternalOptimizer, bs::HostBackend>;

std::filesystem::path fixture(const std::string& name) {
  return std::filesystem::path{BLOCK_STREAMER_TEST_FIXTURES} / "models" / name;
}

bs::StreamerOptions computing_in(bs::DType dtype) {
  bs::StreamerOptions options;
  options.dtype = dtype;
  return options;
}

/// A tiny model of which everything trains.
struct Full {
  explicit Full(const std::string& name,
                bs::StreamerOptions streaming = computing_in(bs::DType::f32),
                bs::HostMode mode = bs::HostMode::attached)
      : model{bs::Checkpoint::open(fixture(name)), {streaming.dtype}},
        masters{bs::models::load_block_masters(model)},
        streamer{model.blocks(), bs::MasterStorage{masters}, bs::HostBackend{mode}, streaming},
        residents{model},
        parameters{residents.around(bs::models::with_full_names(model, masters))} {}

  [[nodiscard]] std::map<std::string, at::Tensor> values() const {
    std::map<std::string, at::Tensor> all;
    for (const auto& [parameter, tensor] : parameters)
      all.emplace(parameter, tensor.detach().clone());
    return all;
  }

  bs::models::DecoderModel model;
  std::vector<bs::NamedTensors> masters;
  FullStreamer streamer;
  bs::models::ResidentParameters residents;
  bs::NamedTensors parameters;
};

/// What transformers and torch computed. @see make_full_fixtures.py
struct Reference {
  explicit Reference(const std::string& name)
      : file{bs::Checkpoint::open(std::string{BLOCK_STREAMER_TEST_FIXTURES} + "/full/" + name +
                                  ".safetensors")},
        losses{bs::load_tensor(file, "losses")},
        norms{bs::load_tensor(file, "norms")} {
    const at::Tensor ids = bs::load_tensor(file, "ids"), trained = bs::load_tensor(file, "trained");
    const at::Tensor lengths = bs::load_tensor(file, "lengths");
    for (std::int64_t step = 0; step < ids.size(0); ++step) {
      for (std::int64_t row = 0; row < ids.size(1); ++row) {
        bs::TextRow& text = rows.emplace_back();
        for (std::int64_t t = 0; t < lengths[step][row].item<std::int64_t>(); ++t) {
          text.tokens.push_back(ids[step][row][t].item<std::int32_t>());
          text.trained.push_back(trained[step][row][t].item<std::uint8_t>());
        }
      }
    }
  }
  bs::Checkpoint file;
  at::Tensor losses, norms;
  std::vector<bs::TextRow> rows;
};

constexpr std::size_t rows_a_step = 3;
constexpr std::uint64_t step_count = 6;
constexpr double max_norm = 4;
const bs::Schedule schedule{bs::ScheduleShape::cosine, 3e-3, 2, step_count};

bs::TrainingOptions like_the_fixture() {
  bs::TrainingOptions options;
  options.adamw = {.weight_decay = 0.1, .decay_vectors = false};
  options.max_grad_norm = max_norm;
  return options;
}

/// The losses and gradient norms of steps from `first` on.
std::vector<std::pair<double, double>> run(Full& full, const std::vector<bs::TextRow>& rows,
                                           const bs::TrainingOptions& options,
                                           std::size_t batch = 2) {
  bs::TrainingLoop loop{full.model, full.streamer, options, &full.residents};
  std::vector<std::pair<double, double>> seen;
  for (std::uint64_t step = 1; step <= step_count; ++step) {
    std::vector<std::size_t> numbers(rows_a_step);
    std::iota(numbers.begin(), numbers.end(), (step - 1) * rows_a_step);
    const auto report = loop.step(rows, numbers, batch, bs::learning_rate_at(schedule, step));
    REQUIRE(report);
    seen.emplace_back(report->loss, report->gradient_norm);
  }
  return seen;
}

/// The same steps with everything resident and LibTorch's own graph over all of it, pass by pass.
std::map<std::string, at::Tensor> resident_run(const std::string& name,
                                               const std::vector<bs::TextRow>& rows,
                                               std::size_t batch) {
  Full full{name};  // its tensors; nothing of it streams here
  auto blocks = full.model.blocks();
  std::vector<std::vector<at::Tensor>> weights;
  for (const auto& block : full.masters) {
    for (auto& of_block = weights.emplace_back(); const auto& [weight, tensor] : block)
      of_block.push_back(tensor);
  }
  std::vector<at::Tensor> parameters;
  for (const auto& [parameter, tensor] : full.parameters) parameters.push_back(tensor);
  bs::AdamW optimizer{like_the_fixture().adamw};
  for (std::uint64_t step = 1; step <= step_count; ++step) {
    const std::size_t first = (step - 1) * rows_a_step;
    std::uint64_t count = 0;
    for (std::size_t i = first; i < first + rows_a_step; ++i)
      count += static_cast<std::uint64_t>(
          std::count(rows[i].trained.begin() + 1, rows[i].trained.end(), 1));
    std::vector<std::pair<at::Tensor, at::Tensor>> looked_up;
    for (std::size_t begin = 0; begin < rows_a_step; begin += batch) {
      std::vector<std::size_t> numbers(std::min(batch, rows_a_step - begin));
      std::iota(numbers.begin(), numbers.end(), first + begin);
      const auto part = bs::make_row_batch(rows, numbers);
      auto context = full.model.context(part.ids);
      const at::Tensor input = full.model.embed(part.ids).detach().set_requires_grad(true);
      const at::Tensor hidden = bs::resident_forward(
          std::span{blocks}, std::span<const std::vector<at::Tensor>>{weights}, input, context);
      (bs::loss_over_tokens(full.model, hidden, bs::token_targets(part.ids, part.trained)).sum /
       static_cast<double>(count))
          .backward();
      looked_up.emplace_back(part.ids, input.grad());
    }
    for (const auto& [ids, gradient] : looked_up)
      full.residents.add_embedding_gradient(ids, gradient);
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    const double norm = bs::global_gradient_norm(gradients);
    optimizer.begin_step({.step = step,
                          .learning_rate = bs::learning_rate_at(schedule, step),
                          .gradient_scale = bs::clip_factor(norm, max_norm)});
    optimizer.update(bs::BlockId{}, parameters, gradients);
    optimizer.end_step();
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor{};
  }
  return full.values();
}

void check_equal(const std::map<std::string, at::Tensor>& a,
                 const std::map<std::string, at::Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (const auto& [name, tensor] : a) {
    INFO(name);
    CHECK(at::equal(tensor, b.at(name)));
  }
}

/// A folder that is gone at the end.
struct Folder {
  explicit Folder(const std::string& name)
      : path{std::filesystem::temp_directory_path() / ("bs-full-" + name)} {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

std::map<std::string, std::string> contents(const std::filesystem::path& folder) {
  std::map<std::string, std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator{folder}) {
    std::ifstream in{entry.path(), std::ios::binary};
    all[entry.path().filename().string()] = {std::istreambuf_iterator<char>{in}, {}};
  }
  return all;
}

}  // namespace

TEST_CASE("full training of a Qwen3 gives the losses and weights of transformers and torch") {
  for (const std::string name : {"qwen3_tied", "qwen3_sharded"}) {
    INFO(name);
    const Reference reference{name};
    Full full{name};
    const auto seen = run(full, reference.rows, like_the_fixture());
    for (std::size_t step = 0; step < step_count; ++step) {
      INFO("step " << step + 1);
      const auto at_step = static_cast<std::int64_t>(step);
      // fp32 sums in another order: 1e-6 of a loss at first, what six updates make of it at last.
      CHECK(seen[step].first == Approx(reference.losses[at_step].item<double>()).epsilon(1e-5));
      CHECK(seen[step].second == Approx(reference.norms[at_step].item<double>()).epsilon(1e-4));
    }
    std::size_t compared = 0;
    for (const auto& [parameter, value] : full.values()) {
      INFO(parameter);
      const at::Tensor expected = bs::load_tensor(reference.file, "final." + parameter);
      const at::Tensor start = bs::load_tensor(full.model.checkpoint(), parameter, bs::DType::f32);
      // A hundredth of the rate: Adam turns rounding of a tiny gradient into a share of a step.
      CHECK((value - expected).abs().max().item<double>() < 3e-5);
      CHECK((value - start).abs().max().item<double>() > 3e-3);
      ++compared;
    }
    CHECK(compared == full.parameters.size());
    CHECK(full.parameters.size() == (name == "qwen3_tied" ? 2 + 2 * 11 : 3 + 3 * 11));
  }
}

TEST_CASE("all of a checkpoint trains and becomes a checkpoint") {
  const Folder output{"example"};
  const std::vector<bs::TextRow> rows = Reference{"qwen3_tied"}.rows;
  const std::vector<std::size_t> numbers{0, 1, 2, 3};
  // [checkpoint]
  bs::models::DecoderModel model{bs::Checkpoint::open(fixture("qwen3_tied")), {bs::DType::f32}};
  auto masters = bs::models::load_block_masters(model);  // fp32, they require a gradient
  bs::Streamer streamer{model.blocks(), bs::MasterStorage{masters}, bs::HostBackend{}};
  bs::models::ResidentParameters residents{model};

  bs::TrainingLoop loop{model, streamer, {.adamw = {.decay_vectors = false}}, &residents};
  for (int step = 0; step < 3; ++step) (void)loop.step(rows, numbers, /*batch=*/2, /*rate=*/1e-3);

  const auto parameters = residents.around(bs::models::with_full_names(model, masters));
  bs::TrainedModelFiles{model.checkpoint(), parameters}.save(output.path);
  // [/checkpoint]
  const bs::Checkpoint saved = bs::Checkpoint::open(output.path);
  CHECK(saved.tensors().size() == parameters.size());
  CHECK(at::equal(bs::load_tensor(saved, "model.norm.weight"), model.final_norm()));
}

TEST_CASE("full training streamed has the bits of full training resident") {
  for (const std::string name : {"qwen3_tied", "qwen3_sharded"}) {
    const Reference reference{name};
    for (const std::size_t batch : {std::size_t{1}, std::size_t{3}}) {
      const auto expected = resident_run(name, reference.rows, batch);
      for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
        for (const std::uint32_t ahead : {0U, 2U}) {
          bs::StreamerOptions streaming = computing_in(bs::DType::f32);
          streaming.prefetch_ahead = ahead;
          Full full{name, streaming, mode};
          (void)run(full, reference.rows, like_the_fixture(), batch);
          INFO(name << ", batch " << batch << ", ahead " << ahead);
          check_equal(full.values(), expected);
        }
      }
    }
  }
}

TEST_CASE("in full training no bit depends on how passes go and where inputs wait") {
  for (const std::string name : {"qwen3_tied", "qwen3_sharded"}) {
    const Reference reference{name};
    for (const auto dtype : {bs::DType::f32, bs::DType::bf16}) {
      std::map<std::string, at::Tensor> expected;
      for (const auto order : {bs::MicroBatchOrder::sequential, bs::MicroBatchOrder::together}) {
        for (const auto place : {bs::ActivationPlace::device, bs::ActivationPlace::ram}) {
          bs::StreamerOptions streaming = computing_in(dtype);
          streaming.activations.place = place;
          Full full{name, streaming, bs::HostMode::detached};
          bs::TrainingOptions options = like_the_fixture();
          options.micro_batches = order;
          (void)run(full, reference.rows, options, /*batch=*/1);
          if (expected.empty()) expected = full.values();
          check_equal(full.values(), expected);
        }
      }
    }
  }
}

TEST_CASE("full training that computes in bf16 keeps fp32 masters, and the model sees them") {
  const Reference reference{"qwen3_tied"};
  Full wide{"qwen3_tied"}, half{"qwen3_tied", computing_in(bs::DType::bf16)};
  const auto exact = run(wide, reference.rows, like_the_fixture());
  const auto seen = run(half, reference.rows, like_the_fixture());
  for (std::size_t i = 0; i < seen.size(); ++i)
    CHECK(seen[i].first == Approx(exact[i].first).epsilon(0.05));
  for (const auto& [name, tensor] : half.parameters) {
    INFO(name);
    CHECK(tensor.scalar_type() == at::kFloat);
    CHECK_FALSE(at::equal(tensor, tensor.to(at::kBFloat16).to(at::kFloat)));
  }
  CHECK(half.model.embedding().scalar_type() == at::kBFloat16);
  CHECK(at::equal(half.model.embedding(), half.parameters[0].tensor.to(at::kBFloat16)));
  CHECK(at::equal(half.model.final_norm(), half.parameters.back().tensor.to(at::kBFloat16)));
}

TEST_CASE("a state of a full run continues it bit for bit, with masters of a half type too") {
  const Folder folder{"state"};
  const Reference reference{"qwen3_sharded"};
  for (const auto dtype : {bs::DType::f32, bs::DType::bf16}) {
    const auto step = [&](auto& loop, std::uint64_t number) {
      std::vector<std::size_t> numbers(rows_a_step);
      std::iota(numbers.begin(), numbers.end(), (number - 1) * rows_a_step);
      REQUIRE(loop.step(reference.rows, numbers, 2, bs::learning_rate_at(schedule, number)));
    };
    Full whole{"qwen3_sharded", computing_in(dtype)}, later{"qwen3_sharded", computing_in(dtype)};
    bs::TrainingLoop loop{whole.model, whole.streamer, like_the_fixture(), &whole.residents};
    for (std::uint64_t n = 1; n <= 3; ++n) step(loop, n);
    const auto path = folder.path / "state.safetensors";
    bs::save_training_state(path, {}, {.step = 3}, whole.parameters, loop.optimizer());
    for (std::uint64_t n = 4; n <= step_count; ++n) step(loop, n);

    bs::TrainingLoop again{later.model, later.streamer, like_the_fixture(), &later.residents};
    bs::load_training_state(path, later.parameters, again.optimizer());
    later.residents.refresh();
    again.set_steps(3);
    for (std::uint64_t n = 4; n <= step_count; ++n) step(again, n);
    check_equal(later.values(), whole.values());
  }
}

TEST_CASE("a step of full training that is not finite or stopped changes nothing") {
  const Reference reference{"qwen3_tied"};
  Full full{"qwen3_tied"};
  const auto before = full.values();
  bs::TrainingOptions options = like_the_fixture();
  options.skip_non_finite = true;
  for (const auto& [name, tensor] : full.parameters) options.labels.push_back(name);
  bs::TrainingLoop loop{full.model, full.streamer, options, &full.residents};
  const std::size_t numbers[] = {0, 1, 2};
  int asked = 0;
  CHECK_FALSE(loop.step(reference.rows, numbers, 1, 1e-3, [&] { return ++asked == 3; }));
  check_equal(full.values(), before);
  {
    const c10::NoGradGuard no_grad;
    full.parameters.back().tensor.fill_(std::numeric_limits<float>::infinity());
  }
  const auto report = loop.step(reference.rows, numbers, 1, 1e-3);
  REQUIRE(report);
  CHECK_THAT(report->not_finite, ContainsSubstring("loss"));
  for (const auto& [name, tensor] : full.parameters) CHECK_FALSE(tensor.grad().defined());
  {
    const c10::NoGradGuard no_grad;
    full.parameters.back().tensor.copy_(before.at("model.norm.weight"));
  }
  check_equal(full.values(), before);
}

TEST_CASE("a trained model is a folder that opens, in the stored types, split as asked") {
  for (const std::string name : {"qwen3_tied", "qwen3_sharded"}) {
    const Folder folder{"files"};
    Full full{name};
    const c10::NoGradGuard no_grad;
    for (const auto& [parameter, tensor] : full.parameters) tensor.add_(0.37);
    const bs::TrainedModelFiles one{full.model.checkpoint(), full.parameters};
    const bs::TrainedModelFiles many{full.model.checkpoint(), full.parameters, 20'000};
    CHECK_FALSE(one.are_in(folder.path));
    one.save(folder.path);
    CHECK(one.are_in(folder.path));
    CHECK_FALSE(many.are_in(folder.path));
    const auto whole = contents(folder.path);
    CHECK(whole.size() == 2);  // config.json, model.safetensors
    for (int round = 0; round < 2; ++round) {
      many.save(folder.path);
      CHECK(many.are_in(folder.path));
      CHECK_FALSE(one.are_in(folder.path));
      CHECK(contents(folder.path).size() > 4);
      const bs::Checkpoint saved = bs::Checkpoint::open(folder.path);
      for (const auto& [parameter, tensor] : full.parameters) {
        const at::Tensor stored = bs::load_tensor(saved, parameter);
        CHECK(stored.scalar_type() == (name == "qwen3_tied" ? at::kFloat : at::kBFloat16));
        CHECK(at::equal(stored, tensor.to(stored.scalar_type())));
      }
    }
    one.save(folder.path);
    CHECK(contents(folder.path) == whole);
    full.parameters[3].tensor.view({-1})[1].add_(0.5);
    CHECK_FALSE(one.are_in(folder.path));
  }
}

TEST_CASE("a trained value that the stored type cannot hold is refused and what was there stays") {
  const Folder folder{"overflow"};
  Full full{"qwen3_sharded"};
  const bs::TrainedModelFiles files{full.model.checkpoint(), full.parameters};
  files.save(folder.path);
  const auto before = contents(folder.path);
  {
    const c10::NoGradGuard no_grad;
    full.parameters[4].tensor.view({-1})[0].fill_(3.4e38);  // infinite in bf16
  }
  CHECK_THROWS_WITH(files.save(folder.path), ContainsSubstring(full.parameters[4].name));
  CHECK(contents(folder.path) == before);
}
