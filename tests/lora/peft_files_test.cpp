// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/block/load_tensor.hpp>
#include <block_streamer/block/projection.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/lora/peft_loading.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <set>

#include <lora/tiny_llama.hpp>
#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "block_streamer_lora_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error{"no temporary folder"};
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::string bytes_in(const fs::path& path) {
  std::ifstream in{path, std::ios::binary};
  return {std::istreambuf_iterator<char>{in}, {}};
}

void put(const fs::path& path, const std::string& text) {
  std::ofstream{path, std::ios::binary} << text;
}

std::set<std::string> files_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator{folder}) names.insert(entry.path().filename());
  return names;
}

/// Gives every tensor values that depend on tensor, place and `salt`.
void fill(const bs::LoraAdapter& adapter, double salt) {
  double index = 0;
  for (const at::Tensor& parameter : adapter.parameters())
    parameter.set_data(at::arange(parameter.numel(), at::kDouble)
                           .mul(0.11)
                           .add(salt + 13 * index++)
                           .sin()
                           .to(at::kFloat)
                           .view(parameter.sizes()));
}

bool equal(const bs::LoraAdapter& a, const bs::LoraAdapter& b) {
  const auto left = a.named_parameters();
  const auto right = b.named_parameters();
  if (left.size() != right.size()) return false;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i].name != right[i].name || !at::equal(left[i].tensor, right[i].tensor)) return false;
  }
  return true;
}

bs::LoraAdapter load(const fs::path& folder) {
  return bs::load_adapter(folder, tiny_llama_blocks(), at::kCPU);
}

/// A copy of a fixture's adapter whose files may be spoiled.
void copy_adapter(const fs::path& from, const fs::path& to) {
  for (const char* name : {"adapter_config.json", "adapter_model.safetensors"})
    fs::copy_file(from / name, to / name, fs::copy_options::overwrite_existing);
}

/// Rewrites the tensor file under other names; "" drops a tensor.
void rename_tensors(const fs::path& folder,
                    const std::function<std::string(const std::string&)>& rename) {
  const fs::path path = folder / "adapter_model.safetensors";
  const bs::Checkpoint file = bs::Checkpoint::open(path);
  std::vector<at::Tensor> kept;
  std::vector<bs::TensorBytes> tensors;
  for (const bs::StoredTensor& tensor : file.tensors()) {
    const std::string name = rename(tensor.spec.name);
    if (name.empty()) continue;
    kept.push_back(bs::load_tensor(file, tensor.spec.name));
    tensors.push_back({{name, tensor.spec.dtype, tensor.spec.shape}, bs::bytes_of(kept.back())});
  }
  bs::write_safetensors(path, tensors);
}

/// Replaces one text in a file, which must hold it.
void edit(const fs::path& path, const std::string& from, const std::string& to) {
  std::string text = bytes_in(path);
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  put(path, text.replace(at, from.size(), to));
}

std::string refusal(const fs::path& folder) {
  try {
    (void)load(folder);
  } catch (const bs::Error& error) {
    return error.what();
  }
  return "accepted";
}

bool says(const std::string& text, const std::string& part) {
  CAPTURE(text);
  CAPTURE(part);
  const bool found = text.find(part) != std::string::npos;
  CHECK(found);
  return found;
}

}  // namespace

TEST_CASE("an adapter of peft gives peft's projections, in fp32 and over a bf16 base") {
  const auto blocks = tiny_llama_blocks();
  const bs::Checkpoint base = bs::Checkpoint::open(lora_fixture("base"));
  for (const std::string name : {"all_linear", "patterned"}) {
    CAPTURE(name);
    const bs::Checkpoint expected =
        bs::Checkpoint::open(lora_fixture(name) / "expected.safetensors");
    const bs::AdapterTable table = load(lora_fixture(name)).table(blocks);
    const auto difference = [&](const std::string& short_name, std::size_t weight,
                                const std::string& key, bs::DType dtype) {
      std::vector<at::Tensor> weights(9);
      weights[weight] = bs::load_tensor(base, "model.layers.3." + short_name + ".weight", dtype);
      std::vector<const bs::ProjectionAdapter*> woven;
      for (const auto& adapter : table.blocks[3].by_weight) woven.push_back(adapter.get());
      const at::Tensor x = bs::load_tensor(expected, key + ".input");
      const at::Tensor y = bs::load_tensor(expected, key + ".output");
      const at::Tensor plain = bs::project(bs::Weights{weights}, weight, x);
      const at::Tensor ours = bs::project(bs::Weights{weights, woven}, weight, x);
      CHECK(plain.sub(y).abs().max().item<double>() > 0.1);
      CHECK(ours.scalar_type() == y.scalar_type());
      return ours.sub(y).abs().max().item<double>();
    };
    CHECK(difference("self_attn.q_proj", 1, "self_attn.q_proj", bs::DType::f32) < 1e-5);
    CHECK(difference("mlp.down_proj", 8, "mlp.down_proj", bs::DType::f32) < 1e-5);
    CHECK(difference("self_attn.q_proj", 1, "bf16", bs::DType::bf16) < 0.016);  // one bf16 step
  }
}

TEST_CASE("b115 ranks, scales and layers of single modules are honoured") {
  const bs::LoraAdapter adapter = load(lora_fixture("patterned"));
  REQUIRE(adapter.modules().size() == 4);
  const auto& down = adapter.modules()[3];
  CHECK(adapter.modules()[0].site.module == "model.layers.1.self_attn.q_proj");
  CHECK(adapter.modules()[0].rank == 3);
  CHECK(adapter.modules()[0].alpha == 7);
  CHECK(adapter.modules()[1].alpha == 5);
  CHECK(down.site.module == "model.layers.3.mlp.down_proj");
  CHECK(down.rank == 2);
  CHECK(down.a.sizes() == at::IntArrayRef{2, 36});
  CHECK(down.b.requires_grad());
  const bs::AdapterTable table = adapter.table(tiny_llama_blocks());
  CHECK(table.blocks[0].parameters.empty());
  const auto* woven = dynamic_cast<const bs::LoraProjection*>(table.blocks[3].by_weight[8].get());
  REQUIRE(woven != nullptr);
  CHECK(woven->scale() == Approx(5 / std::sqrt(2.0)));  // rank-stabilised
}

TEST_CASE("what is saved loads again bit for bit, and the same adapter gives the same bytes") {
  const TemporaryFolder folder;
  const auto blocks = tiny_llama_blocks();
  const bs::LoraOptions options = GENERATE(
      bs::LoraOptions{.rank = 3, .alpha = 7.5, .dropout = 0.25, .use_rslora = true},
      bs::LoraOptions{.rank = 5, .targets = {"o_proj", "self_attn.k_proj"}, .top_fraction = 0.5},
      bs::LoraOptions{.rank = 2, .targets = {"model.layers.2.mlp.up_proj"}},
      bs::LoraOptions{.rank = 2, .targets = {"q_proj", "model.layers.0.mlp.up_proj"}});
  const bs::LoraAdapter adapter = bs::make_lora_adapter(blocks, options, at::kCPU);
  fill(adapter, 3);
  bs::save_adapter(folder.path() / "a" / "new", adapter, "some/model");
  bs::save_adapter(folder.path() / "b", adapter, "some/model");
  const fs::path saved = folder.path() / "a" / "new";
  CHECK(files_in(saved) ==
        std::set<std::string>{"adapter_config.json", "adapter_model.safetensors"});
  for (const char* name : {"adapter_config.json", "adapter_model.safetensors"})
    CHECK(bytes_in(saved / name) == bytes_in(folder.path() / "b" / name));
  const bs::LoraAdapter loaded = load(saved);
  CHECK(equal(adapter, loaded));
  CHECK(loaded.options().rank == options.rank);
  CHECK(loaded.options().alpha == options.alpha);
  CHECK(loaded.options().dropout == options.dropout);
  CHECK(loaded.options().use_rslora == options.use_rslora);
  bs::save_adapter(folder.path() / "c", loaded, "some/model");
  CHECK(bytes_in(folder.path() / "c" / "adapter_config.json") ==
        bytes_in(saved / "adapter_config.json"));
}

TEST_CASE("a top fraction is written as layers_to_transform, all-linear as short names") {
  const TemporaryFolder folder;
  const bs::LoraAdapter adapter =
      bs::make_lora_adapter(tiny_llama_blocks(), {.rank = 2, .top_fraction = 0.5}, at::kCPU);
  bs::save_adapter(folder.path(), adapter);
  const auto json = nlohmann::json::parse(bytes_in(folder.path() / "adapter_config.json"));
  CHECK(json["layers_to_transform"] == nlohmann::json{2, 3});
  CHECK(json["target_modules"] == nlohmann::json{"down_proj", "gate_proj", "k_proj", "o_proj",
                                                 "q_proj", "up_proj", "v_proj"});
  CHECK(json["peft_type"] == "LORA");
  CHECK(json["task_type"] == "CAUSAL_LM");
  CHECK(json["bias"] == "none");
  CHECK(json["base_model_name_or_path"].is_null());
  const bs::Checkpoint file = bs::Checkpoint::open(folder.path() / "adapter_model.safetensors");
  CHECK(file.tensors().size() == 28);
  CHECK(file.find("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight") != nullptr);
}

TEST_CASE("b115 adapters of peft survive our saving: patterns, layers, names") {
  const TemporaryFolder folder;
  for (const std::string name : {"all_linear", "patterned"}) {
    const bs::LoraAdapter adapter = load(lora_fixture(name));
    bs::save_adapter(folder.path(), adapter, "base");
    const bs::LoraAdapter again = load(folder.path());
    CHECK(equal(adapter, again));
    for (std::size_t i = 0; i < adapter.modules().size(); ++i) {
      CHECK(adapter.modules()[i].rank == again.modules()[i].rank);
      CHECK(adapter.modules()[i].alpha == again.modules()[i].alpha);
    }
  }
}

TEST_CASE("b108 wrappers' prefixes and none are accepted, and every tensor is used") {
  const TemporaryFolder folder;
  const bs::LoraAdapter original = load(lora_fixture("patterned"));
  const std::string old = "base_model.model.model.";
  for (const std::string prefix :
       {"base_model.model.model.language_model.", "base_model.model.language_model.model.",
        "model.language_model.", "model.", ""}) {
    CAPTURE(prefix);
    copy_adapter(lora_fixture("patterned"), folder.path());
    rename_tensors(folder.path(),
                   [&](const std::string& name) { return prefix + name.substr(old.size()); });
    CHECK(equal(original, load(folder.path())));
  }
}

TEST_CASE("b108 an adapter that matches nothing, or not wholly, is refused") {
  const TemporaryFolder folder;
  copy_adapter(lora_fixture("patterned"), folder.path());
  SECTION("another model's prefix in the file") {
    rename_tensors(folder.path(), [](const std::string& name) {
      return "base_model.model.vision." + name.substr(17);
    });
    const std::string text = refusal(folder.path());
    CHECK(says(text, "missing: model.layers.1.self_attn.q_proj.lora_A.weight"));
    CHECK(says(text, "belong to no adapted module"));
    CHECK(says(text, "and 3 more"));
  }
  SECTION("targets that the model does not have") {
    edit(folder.path() / "adapter_config.json", "\"mlp.down_proj\",\n    \"q_proj\"", "\"wqkv\"");
    CHECK(says(refusal(folder.path()), "match no linear map"));
  }
  SECTION("layers that the model does not have") {
    edit(folder.path() / "adapter_config.json", "1,\n    3", "7,\n    9");
    CHECK(says(refusal(folder.path()), "match no linear map"));
  }
  SECTION("one tensor under two names") {
    const bs::Checkpoint file = bs::Checkpoint::open(folder.path() / "adapter_model.safetensors");
    const std::string name = file.tensors()[0].spec.name;
    const at::Tensor tensor = bs::load_tensor(file, name);
    std::vector<bs::TensorBytes> twice;
    for (const std::string& n : {name, name.substr(17)})
      twice.push_back({{n, bs::DType::f32, bs::shape_of(tensor)}, bs::bytes_of(tensor)});
    bs::write_safetensors(folder.path() / "adapter_model.safetensors", twice);
    CHECK(says(refusal(folder.path()), "are the same tensor"));
  }
}

TEST_CASE("b115 missing, unknown and misshapen tensors are refused by name") {
  const TemporaryFolder folder;
  copy_adapter(lora_fixture("patterned"), folder.path());
  const std::string key = "base_model.model.model.layers.3.mlp.down_proj.lora_B.weight";
  SECTION("missing lora_B") {
    rename_tensors(folder.path(),
                   [&](const std::string& name) { return name == key ? std::string{} : name; });
    CHECK(says(refusal(folder.path()), "missing: model.layers.3.mlp.down_proj.lora_B.weight"));
  }
  SECTION("a stranger") {
    rename_tensors(folder.path(), [&](const std::string& name) {
      return name == key ? "base_model.model.model.layers.3.mlp.down_proj.lora_magnitude" : name;
    });
    const std::string text = refusal(folder.path());
    CHECK(says(text, "lora_magnitude"));
    CHECK(says(text, "lora_B.weight"));
  }
  SECTION("a module that the configuration does not adapt") {
    edit(folder.path() / "adapter_config.json", "1,\n    3", "3");
    CHECK(says(refusal(folder.path()), "layers.1.self_attn.q_proj.lora_A.weight"));
  }
  SECTION("a rank that is another") {
    edit(folder.path() / "adapter_config.json", "layers.3.mlp.down_proj\": 2",
         "layers.3.mlp.down_proj\": 1000000");
    CHECK(says(refusal(folder.path()), "rank must lie"));
    edit(folder.path() / "adapter_config.json", "1000000", "1");
    const std::string text = refusal(folder.path());
    CHECK(says(text, "layers.3.mlp.down_proj.lora_A.weight"));
    CHECK(says(text, "[2, 36]"));
    CHECK(says(text, "[1, 36]"));
  }
  CHECK(says(refusal(folder.path()), folder.path().string()));
}

TEST_CASE("an adapter with a value that is not finite is refused with its file and tensor") {
  const TemporaryFolder folder;
  copy_adapter(lora_fixture("patterned"), folder.path());
  const fs::path path = folder.path() / "adapter_model.safetensors";
  const std::string key = "base_model.model.model.layers.3.mlp.down_proj.lora_B.weight";
  const auto tensor = bs::Checkpoint::open(path).at(key);
  REQUIRE(tensor.spec.dtype == bs::DType::f32);
  std::fstream file{path, std::ios::binary | std::ios::in | std::ios::out};
  file.seekp(static_cast<std::streamoff>(tensor.range.end() - 4));
  file.write("\0\0\xc0\x7f", 4);
  file.close();
  const std::string text = refusal(folder.path());
  CHECK(says(text, "adapter_model.safetensors: tensor " + key));
  CHECK(says(text, "not finite"));
}

TEST_CASE("options that are not implemented are refused by name") {
  const TemporaryFolder folder;
  const fs::path config = folder.path() / "adapter_config.json";
  const auto refused = [&](const std::string& from, const std::string& to,
                           const std::string& name) {
    copy_adapter(lora_fixture("patterned"), folder.path());
    edit(config, from, to);
    return says(refusal(folder.path()), name);
  };
  CHECK(refused("\"use_dora\": false", "\"use_dora\": true", "use_dora"));
  CHECK(refused("\"bias\": \"none\"", "\"bias\": \"all\"", "bias"));
  CHECK(refused("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]",
                "modules_to_save"));
  CHECK(refused("\"lora_bias\": false", "\"lora_bias\": true", "lora_bias"));
  CHECK(refused("\"fan_in_fan_out\": false", "\"fan_in_fan_out\": true", "fan_in_fan_out"));
  CHECK(refused("\"peft_type\": \"LORA\"", "\"peft_type\": \"LOHA\"", "peft_type"));
  CHECK(refused("\"task_type\": \"CAUSAL_LM\"", "\"task_type\": \"SEQ_CLS\"", "task_type"));
  CHECK(refused("\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"", "pissa"));
  CHECK(refused("\"layer_replication\": null", "\"layer_replication\": [[0, 2]]",
                "layer_replication"));
  CHECK(refused("\"trainable_token_indices\": null", "\"trainable_token_indices\": [1]",
                "trainable_token_indices"));
  CHECK(
      refused("\"bias\": \"none\"", "\"bias\": \"none\", \"new_trick\": {\"x\": 1}", "new_trick"));
  CHECK(refused("\"r\": 3", "\"r\": \"three\"", "\"r\""));
  CHECK(refused("\"r\": 3", "\"r\": 0", "rank"));
  CHECK(refused("\"lora_alpha\": 5", "\"lora_alpha\": -5", "alpha"));
  CHECK(refused("\"lora_dropout\": 0.0", "\"lora_dropout\": 1.0", "dropout"));
  CHECK(refused("\"r\": 3", "\"r\": 3, \"r\": 4", "twice"));
  copy_adapter(lora_fixture("patterned"), folder.path());
  edit(config, "\"bias\": \"none\"", "\"bias\": \"none\", \"new_trick\": null");
  CHECK(refusal(folder.path()) == "accepted");
}

TEST_CASE("b112 an adapter file on the embedding or the head is refused") {
  const TemporaryFolder folder;
  copy_adapter(lora_fixture("patterned"), folder.path());
  const std::string old = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight";
  for (const std::string name : {"base_model.model.model.embed_tokens.lora_embedding_A",
                                 "base_model.model.lm_head.lora_A.weight"}) {
    copy_adapter(lora_fixture("patterned"), folder.path());
    rename_tensors(folder.path(), [&](const std::string& n) { return n == old ? name : n; });
    CHECK(says(refusal(folder.path()), name));
  }
}

TEST_CASE("target modules may be a regular expression over whole names") {
  const TemporaryFolder folder;
  copy_adapter(lora_fixture("patterned"), folder.path());
  const fs::path path = folder.path() / "adapter_config.json";
  auto json = nlohmann::json::parse(bytes_in(path));
  json["layers_to_transform"] = nullptr;
  json["target_modules"] = R"(model\.layers\.[13]\.(self_attn\.q_proj|mlp\.down_proj))";
  put(path, json.dump());
  const bs::LoraAdapter adapter = load(folder.path());
  CHECK(equal(adapter, load(lora_fixture("patterned"))));
  bs::save_adapter(folder.path(), adapter);
  CHECK(equal(adapter, load(folder.path())));
  json["exclude_modules"] = "q_proj";  // a whole name, as an expression: excludes nothing
  put(path, json.dump());
  CHECK(refusal(folder.path()) == "accepted");
  json["exclude_modules"] = {"q_proj"};
  put(path, json.dump());
  CHECK(says(refusal(folder.path()), "q_proj.lora_A.weight"));
  json["target_modules"] = "((((((a*)*)*)*)*)*)*b|(";
  put(path, json.dump());
  CHECK(says(refusal(folder.path()), "not a regular expression"));
}

TEST_CASE("broken or absent files are refused with their names") {
  const TemporaryFolder folder;
  CHECK(says(refusal(folder.path()), "adapter_config.json"));
  fs::copy_file(lora_fixture("patterned") / "adapter_config.json",
                folder.path() / "adapter_config.json");
  CHECK(says(refusal(folder.path()), "adapter_model.safetensors"));
  copy_adapter(lora_fixture("patterned"), folder.path());
  fs::resize_file(folder.path() / "adapter_model.safetensors", 1000);
  CHECK(says(refusal(folder.path()), "adapter_model.safetensors"));
  put(folder.path() / "adapter_config.json", "{\"r\": ");
  CHECK(says(refusal(folder.path()), "not valid JSON"));
}

TEST_CASE("b121 a full disk leaves the old adapter whole and nothing half-written") {
  const TemporaryFolder folder;
  const auto blocks = tiny_llama_blocks();
  const bs::LoraAdapter old = bs::make_lora_adapter(blocks, {.rank = 4, .seed = 1}, at::kCPU);
  const bs::LoraAdapter larger = bs::make_lora_adapter(blocks, {.rank = 9, .seed = 2}, at::kCPU);
  fill(old, 1);
  bs::save_adapter(folder.path(), old);
  ::signal(SIGXFSZ, SIG_IGN);  // a file-size limit then fails like a full disk
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  for (const rlim_t limit : {0U, 100U, 5000U, 20000U}) {
    const rlimit small{limit, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK_THROWS_AS(bs::save_adapter(folder.path(), larger), bs::StorageError);
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(equal(old, load(folder.path())));
    CHECK(files_in(folder.path()).size() == 2);
  }
  ::signal(SIGXFSZ, SIG_DFL);
  bs::save_adapter(folder.path(), larger);
  CHECK(equal(larger, load(folder.path())));
}

TEST_CASE("b121 a process killed while saving leaves one whole generation") {
  const TemporaryFolder folder;
  const auto blocks = tiny_llama_blocks();
  const bs::LoraAdapter adapter = bs::make_lora_adapter(blocks, {.rank = 4}, at::kCPU);
  std::vector<std::vector<at::Tensor>> generations;
  for (int g = 0; g < 2; ++g) {
    fill(adapter, 100 * g);
    generations.emplace_back();
    for (const at::Tensor& p : adapter.parameters()) generations[g].push_back(p.detach().clone());
  }
  bs::save_adapter(folder.path(), adapter);
  for (int kill = 0; kill < 25; ++kill) {
    std::array<int, 2> pipe{};
    REQUIRE(::pipe(pipe.data()) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      for (std::size_t g = 0;; g = 1 - g) {
        for (std::size_t i = 0; i < generations[g].size(); ++i)
          adapter.parameters()[i].set_data(generations[g][i]);
        bs::save_adapter(folder.path(), adapter);
        if (::write(pipe[1], "x", 1) != 1) ::_exit(1);
      }
    }
    std::array<char, 1> byte{};
    for (int i = 0; i <= kill % 5; ++i) REQUIRE(::read(pipe[0], byte.data(), 1) == 1);
    for (int spin = 0; spin < kill * 500; ++spin)
      static_cast<void>(::getppid());  // another moment of the next saving each time
    REQUIRE(::kill(child, SIGKILL) == 0);
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    ::close(pipe[0]);
    ::close(pipe[1]);
    const std::vector<at::Tensor> found = load(folder.path()).parameters();
    const std::size_t g = at::equal(found[0], generations[0][0]) ? 0 : 1;
    for (std::size_t i = 0; i < found.size(); ++i) CHECK(at::equal(found[i], generations[g][i]));
  }
  bs::save_adapter(folder.path(), adapter);
  CHECK(files_in(folder.path()).size() == 2);
}
