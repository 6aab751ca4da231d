// SPDX-License-Identifier: Apache-2.0
// Embedding and head off the device against both of them resident: the same bits.
#include "resident_model.hpp"

#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/models/qwen3.hpp>
#include <block_streamer/models/stream_head.hpp>
#include <block_streamer/storage/decorators/faulty_storage.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/streamer.hpp>
#include <block_streamer/train/token_loss.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include <support/catch.hpp>
#include <support/fresh_folder.hpp>

using namespace block_streamer_test;
namespace models = bs::models;
namespace fs = std::filesystem;

namespace {

const std::vector<std::string> every_model{"qwen3_tied", "qwen3_sharded", "llama_gqa",
                                           "llama_scaled"};
const std::vector<bs::DType> both_types{bs::DType::f32, bs::DType::bf16};

/// Elements a slice so that a tiny head has several: 3 of 32 rows at C = 36 (the llamas), 7 of
/// 16 at C = 40 (the Qwens).
constexpr std::uint64_t few = 640;

models::DecoderOptions off_device(bs::DType dtype, std::uint64_t elements = few) {
  return {.dtype = dtype,
          .embedding_resident = false,
          .head_resident = false,
          .head_slice_elements = elements};
}

models::DecoderModel resident_model(const std::string& name, bs::DType dtype,
                                    std::uint64_t elements = few) {
  return models::DecoderModel{bs::Checkpoint::open(fixture(name)),
                              {.dtype = dtype, .head_slice_elements = elements}};
}

models::DecoderModel streamed_model(const std::string& name, bs::DType dtype,
                                    const bs::PipelineOptions& options = {},
                                    const std::string& tier = "file",
                                    std::uint64_t elements = few) {
  models::DecoderModel model{bs::Checkpoint::open(fixture(name)), off_device(dtype, elements)};
  bs::AnyStorage storage = bs::FileStorage{model.head_map()};
  if (tier == "ram") storage = bs::RamStorage::load(model.head_map());
  if (tier == "mapped") storage = bs::MappedStorage{model.head_map()};
  models::stream_head(model, std::move(storage), bs::HostBackend{}, options);
  return model;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(),
                     a.nbytes()) == 0;
}

/// Values that no two positions share.
at::Tensor some_hidden(const models::DecoderModel& model, std::int64_t batch, std::int64_t tokens) {
  const auto width = static_cast<std::int64_t>(model.config().hidden_size);
  return at::arange(batch * tokens * width, at::kDouble)
      .mul(0.37)
      .sin()
      .view({batch, tokens, width})
      .to(bs::scalar_type_of(model.dtype()));
}

std::string thrown_by(const auto& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A copy of a one-file fixture that a test may damage.
class Copy {
 public:
  explicit Copy(const std::string& name) {
    for (const char* file : {"config.json", "model.safetensors"}) {
      fs::copy_file(fixture(name) / file, folder_ / file);
    }
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  ~Copy() { fs::remove_all(folder_); }
  [[nodiscard]] const fs::path& folder() const { return folder_; }
  [[nodiscard]] fs::path weights() const { return folder_ / "model.safetensors"; }

 private:
  fs::path folder_ = support::fresh_folder("bs-vocabulary-");
};

}  // namespace

TEST_CASE("rows read from the file are those of a table on the device, and no other is read") {
  for (const std::string& name : every_model) {
    for (const bs::DType dtype : {bs::DType::f32, bs::DType::bf16, bs::DType::f16}) {
      INFO(name << " " << bs::name_of(dtype));
      const models::DecoderModel resident = resident_model(name, dtype);
      const models::DecoderModel rows{bs::Checkpoint::open(fixture(name)), off_device(dtype)};
      CHECK_FALSE(rows.embedding_is_resident());
      CHECK_FALSE(rows.embedding().defined());
      const at::Tensor ids = at::tensor({5, 88, 0, 5, 6, 7, 0, 41}, at::kLong).view({2, 4});
      CHECK(same_bits(rows.embed(ids), resident.embed(ids)));
      // Transposed ids, and none at all.
      CHECK(same_bits(rows.embed(ids.t()), resident.embed(ids.t())));
      CHECK(rows.embed(ids.narrow(1, 0, 0)).sizes() ==
            at::IntArrayRef{2, 0, static_cast<std::int64_t>(rows.config().hidden_size)});
      // 0, 5, 6, 7, 41, 88, twice.
      CHECK(rows.embedding_reads().rows == 12);
      const bs::StoredTensor& stored = rows.checkpoint().at("model.embed_tokens.weight");
      CHECK(rows.embedding_reads().bytes ==
            12 * rows.config().hidden_size * bs::byte_count_of(stored.spec.dtype));
      CHECK(resident.embedding_reads().bytes == 0);
    }
  }
}

TEST_CASE("ids that have no row are refused by name, and nothing is read for them") {
  const models::DecoderModel model{bs::Checkpoint::open(fixture("qwen3_sharded")),
                                   off_device(bs::DType::f32)};
  const auto beyond = [&] { (void)model.embed(at::tensor({3, 97}, at::kLong).view({1, 2})); };
  CHECK_THROWS_AS(beyond(), bs::Error);
  CHECK(contains(thrown_by(beyond), "token id 97 is outside the model's vocabulary of 97"));
  const auto negative = [&] { (void)model.embed(at::full({1, 2}, -1, at::kLong)); };
  CHECK(contains(thrown_by(negative), "token id -1 is outside"));
  CHECK(model.embedding_reads().rows == 0);
}

TEST_CASE("a row behind the end of a file that shrank is told with file, offset, tensor and row") {
  const Copy copy{"qwen3_tied"};
  const models::DecoderModel model{bs::Checkpoint::open(copy.folder()), off_device(bs::DType::f32)};
  const bs::StoredTensor& table = model.checkpoint().at("model.embed_tokens.weight");
  const std::uint64_t offset = table.range.offset + 60 * 40 * 4;
  fs::resize_file(copy.weights(), offset + 5);
  CHECK_NOTHROW(model.embed(at::full({1, 1}, 59, at::kLong)));
  const auto read = [&] { (void)model.embed(at::full({1, 1}, 60, at::kLong)); };
  CHECK_THROWS_AS(read(), bs::StorageError);
  const std::string message = thrown_by(read);
  CAPTURE(message);
  CHECK(contains(message, copy.weights().string() + ", offset " + std::to_string(offset)));
  CHECK(contains(message, "tensor model.embed_tokens.weight, row 60"));
}

TEST_CASE("a tied table is on the device if embedding or head is to be, else neither") {
  const auto make = [](const std::string& name, bool embedding, bool head) {
    return models::DecoderModel{
        bs::Checkpoint::open(fixture(name)),
        {.embedding_resident = embedding, .head_resident = head, .head_slice_elements = few}};
  };
  for (const bool embedding : {false, true}) {
    const models::DecoderModel tied = make("qwen3_tied", embedding, /*head=*/true);
    CHECK(tied.embedding_is_resident());
    CHECK(tied.head_is_resident());
    CHECK(tied.head().is_same(tied.embedding()));
  }
  CHECK(make("qwen3_tied", true, false).head_is_resident());
  CHECK_FALSE(make("qwen3_tied", false, false).head_is_resident());
  CHECK_FALSE(make("qwen3_sharded", false, true).embedding_is_resident());
  CHECK(make("qwen3_sharded", false, true).head_is_resident());
  CHECK(make("qwen3_sharded", true, false).embedding_is_resident());
  CHECK_FALSE(make("qwen3_sharded", true, false).head_is_resident());
}

TEST_CASE("logits of a streamed head are those of a resident one, bit for bit") {
  const c10::NoGradGuard no_grad;
  for (const std::string& name : every_model) {
    for (const bs::DType dtype : both_types) {
      for (const std::uint64_t elements : {few, 2 * few, std::uint64_t{1} << 25}) {
        const models::DecoderModel resident = resident_model(name, dtype, elements);
        const auto slices = resident.head_slices().size();
        for (const std::string tier : {"file", "ram", "mapped"}) {
          for (const std::uint32_t ahead : {0U, 1U, 3U}) {
            INFO(name << " " << bs::name_of(dtype) << ", " << slices << " slices, " << tier
                      << ", ahead " << ahead);
            const models::DecoderModel streamed =
                streamed_model(name, dtype, {.prefetch_ahead = ahead}, tier, elements);
            for (const std::int64_t tokens : {1, 5}) {
              const at::Tensor hidden = some_hidden(resident, 2, tokens);
              const at::Tensor logits = streamed.logits(hidden);
              CHECK(same_bits(logits, resident.logits(hidden)));
              CHECK(same_bits(streamed.logits_last(hidden), resident.logits_last(hidden)));
              // Not by a mistake that both share.
              const at::Tensor plain = at::linear(
                  bs::rms_norm(hidden, resident.final_norm(), resident.config().rms_norm_eps),
                  resident.head());
              CHECK(largest_difference(logits, plain) < (dtype == bs::DType::f32 ? 1e-5 : 0.1));
            }
            CHECK(streamed.head_statistics().peak_resident_blocks <= ahead + 1);
            CHECK(streamed.head_statistics().passes == 4);
          }
        }
      }
    }
  }
}

TEST_CASE("a head is streamed in inference mode, and after a change of the grad mode") {
  const models::DecoderModel resident = resident_model("qwen3_sharded", bs::DType::f32);
  const models::DecoderModel streamed = streamed_model("qwen3_sharded", bs::DType::f32);
  const at::Tensor hidden = some_hidden(resident, 1, 3);
  const at::Tensor expected = resident.logits(hidden);
  {
    const c10::InferenceMode inference;
    CHECK(same_bits(streamed.logits(hidden.clone()), expected));
  }
  CHECK(same_bits(streamed.logits(hidden), expected));
  CHECK_FALSE(streamed.logits(hidden).requires_grad());
}

TEST_CASE("the gradient through a streamed head is that through a resident one, bit for bit") {
  for (const std::string& name : every_model) {
    for (const bs::DType dtype : both_types) {
      for (const std::uint64_t elements : {few, std::uint64_t{1} << 25}) {
        INFO(name << " " << bs::name_of(dtype) << ", " << elements << " elements a slice");
        const models::DecoderModel resident = resident_model(name, dtype, elements);
        const models::DecoderModel streamed = streamed_model(name, dtype, {}, "file", elements);
        const auto gradient = [&](const auto& logits_of) {
          const at::Tensor hidden = some_hidden(resident, 2, 5).requires_grad_();
          const at::Tensor ids = at::arange(10, at::kLong).view({2, 5});
          bs::token_loss(logits_of(hidden), ids, at::ones_like(ids, at::kBool)).sum.backward();
          return hidden.grad();
        };
        const at::Tensor expected =
            gradient([&](const at::Tensor& x) { return resident.logits(x); });
        CHECK(
            same_bits(gradient([&](const at::Tensor& x) { return streamed.logits(x); }), expected));
        const at::Tensor plain = gradient([&](const at::Tensor& x) {
          return at::linear(bs::rms_norm(x, resident.final_norm(), resident.config().rms_norm_eps),
                            resident.head());
        });
        CHECK(largest_difference(expected, plain) <
              plain.abs().max().item<double>() * (dtype == bs::DType::f32 ? 1e-5 : 2e-2));
      }
    }
  }
}

TEST_CASE("a backward fetches again what is no longer there of the head, and graphs do not wait") {
  const models::DecoderModel model = streamed_model(
      "qwen3_sharded", bs::DType::bf16, {.prefetch_ahead = 1, .prefetch_next_pass = false});
  const std::size_t slices = model.head_slices().size();
  REQUIRE(slices == 7);
  const at::Tensor hidden = some_hidden(model, 1, 2).requires_grad_();
  const at::Tensor logits = model.logits(hidden);
  CHECK(model.head_statistics().fetches == slices);
  CHECK(model.head_statistics().bytes_needed == std::uint64_t{97} * 40 * 2);
  CHECK(model.head_statistics().bytes_read == std::uint64_t{97} * 40 * 2);
  (void)model.logits(hidden.detach());  // another pass in between
  const std::uint64_t before = model.head_statistics().fetches;
  logits.sum().backward();
  CHECK(hidden.grad().defined());
  CHECK(model.head_statistics().fetches == before + slices - 2);  // the last two are still there
  const at::Tensor again = model.logits(hidden);
  const auto twice = [&] {
    (void)torch::autograd::grad({again.sum()}, {hidden}, {}, true, /*create_graph=*/true);
  };
  CHECK(contains(thrown_by(twice), "second derivative"));
}

TEST_CASE("adapters train through a streamed head as through a resident one") {
  for (const std::string name : {"qwen3_tied", "qwen3_sharded"}) {
    for (const bs::DType dtype : both_types) {
      INFO(name << " " << bs::name_of(dtype));
      struct Step {
        at::Tensor loss;
        std::vector<at::Tensor> gradients;
      };
      const auto train = [&](const models::DecoderModel& model) {
        const auto sites =
            bs::lora_blocks_of<models::DecoderBlock>(model.blocks(), model.layout().blocks);
        auto adapter = bs::make_lora_adapter(sites, {.rank = 2}, at::kCPU);
        for (const auto& module : adapter.modules()) {
          const c10::NoGradGuard no_grad;
          at::Tensor{module.b}.fill_(0.01);
        }
        bs::StreamerOptions options;
        options.dtype = dtype;
        bs::Streamer streamer{model.blocks(), bs::FileStorage{model.block_map()}, bs::HostBackend{},
                              options};
        streamer.attach(adapter.table(sites));
        const at::Tensor ids = at::arange(12, at::kLong).mul(7).view({2, 6});
        const at::Tensor hidden = streamer.train().forward(model.embed(ids), model.context(ids));
        Step step{bs::token_loss(model.logits(hidden), ids, at::ones_like(ids, at::kBool)).sum, {}};
        step.loss.backward();
        for (const at::Tensor& p : adapter.parameters()) step.gradients.push_back(p.grad());
        return step;
      };
      const Step expected = train(resident_model(name, dtype));
      const Step streamed = train(streamed_model(name, dtype));
      CHECK(same_bits(streamed.loss.detach(), expected.loss.detach()));
      REQUIRE(streamed.gradients.size() == expected.gradients.size());
      for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
        CHECK(same_bits(streamed.gradients[i], expected.gradients[i]));
        CHECK(expected.gradients[i].abs().max().item<double>() > 0);
      }
    }
  }
}

TEST_CASE("a fetch of the head that fails ends its pass, names the rows, and the next pass works") {
  const models::DecoderModel resident = resident_model("qwen3_sharded", bs::DType::f32);
  models::DecoderModel model{bs::Checkpoint::open(fixture("qwen3_sharded")),
                             off_device(bs::DType::f32)};
  bs::FaultScript script;
  script.fail(4, std::make_error_code(std::errc::io_error));
  models::stream_head(model, bs::FaultyStorage{bs::FileStorage{model.head_map()}, script},
                      bs::HostBackend{}, {.prefetch_ahead = 1});
  const at::Tensor hidden = some_hidden(model, 1, 2);
  const auto fail = [&] { (void)model.logits(hidden); };
  const std::string message = thrown_by(fail);
  CAPTURE(message);
  CHECK(contains(message, "tensor lm_head.weight[64:80]"));
  CHECK(contains(message, ".safetensors, offset "));
  CHECK(same_bits(model.logits(hidden), resident.logits(hidden)));
}

TEST_CASE("a head that is not where it should be is refused by name") {
  models::DecoderModel model{bs::Checkpoint::open(fixture("qwen3_sharded")),
                             off_device(bs::DType::f32)};
  const auto early = [&] { (void)model.logits(some_hidden(model, 1, 1)); };
  CHECK_THROWS_AS(early(), bs::ContractViolation);
  CHECK(contains(thrown_by(early), "call stream_head()"));
  CHECK(model.head_statistics() == bs::Statistics{});

  models::DecoderModel resident = resident_model("qwen3_sharded", bs::DType::f32);
  const auto twice = [&] {
    models::stream_head(resident, bs::FileStorage{resident.head_map()}, bs::HostBackend{});
  };
  CHECK_THROWS_AS(twice(), bs::ContractViolation);
  // Slices of another size.
  const models::DecoderModel other{bs::Checkpoint::open(fixture("qwen3_sharded")),
                                   off_device(bs::DType::f32, 2 * few)};
  const auto foreign = [&] {
    models::stream_head(model, bs::FileStorage{other.head_map()}, bs::HostBackend{});
  };
  CHECK_THROWS_AS(foreign(), bs::ContractViolation);
  // As many slices, of another tensor.
  const bs::Checkpoint& checkpoint = model.checkpoint();
  const auto embedding = [&] {
    models::stream_head(model,
                        bs::FileStorage{bs::make_row_slice_map(checkpoint, model.layout().embedding,
                                                               model.head_slices())},
                        bs::HostBackend{});
  };
  CHECK_THROWS_AS(embedding(), bs::BindingError);
}

TEST_CASE("a head that is there stays part of the caller's own graph") {
  const models::DecoderModel model = resident_model("qwen3_sharded", bs::DType::f32);
  at::Tensor{model.head()}.requires_grad_();
  model.logits(some_hidden(model, 1, 2)).sum().backward();
  CHECK(model.head().grad().defined());
}
