// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <block_streamer/lora/merge.hpp>
#include <block_streamer/lora/peft_loading.hpp>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <support/catch.hpp>
#include <support/peak_memory.hpp>
#include <support/safetensors_files.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

/// Two blocks with a projection each, and what is no projection; values by the tensor's type.
struct Base {
  explicit Base(const fs::path& at, at::ScalarType type = at::kFloat, double size = 0.1)
      : folder{at} {
    fs::create_directories(folder);
    for (const std::string block : {"layers.0", "layers.1"}) {
      add(block + ".proj.weight", at::randn({5, 7}, generator).mul(size).to(type));
      add(block + ".norm.weight", at::randn({7}, generator).to(type));
      sites.push_back({block, {{"proj.weight", {5, 7}, true}, {"norm.weight", {7}, false}}});
    }
    add("embed.weight", at::randn({11, 7}, generator).to(at::kBFloat16));
    add("counts", at::arange(3, at::kLong));
    write();
    support::write_text(folder / "config.json", "{\"model_type\": \"toy\"}\n");
    support::write_text(folder / "tokenizer.json", "{}");
  }
  void add(const std::string& name, const at::Tensor& tensor) {
    tensors[name] = tensor.contiguous();
  }
  void write() const {
    std::vector<bs::TensorBytes> list;
    for (const auto& [name, tensor] : tensors)
      list.push_back(
          {{name, bs::dtype_of(tensor.scalar_type()), bs::shape_of(tensor)}, bs::bytes_of(tensor)});
    bs::write_safetensors(folder / "model.safetensors", list);
  }
  [[nodiscard]] bs::LoraAdapter adapter(const bs::LoraOptions& options) const {
    bs::LoraAdapter made = bs::make_lora_adapter(sites, options, at::kCPU);
    for (const at::Tensor& p : made.parameters())
      p.set_data(at::randn(p.sizes(), generator, at::kFloat).mul(0.1));
    return made;
  }

  fs::path folder;
  at::Generator generator = at::detail::createCPUGenerator(3);
  std::map<std::string, at::Tensor> tensors;
  std::vector<bs::LoraBlock> sites;
};

std::map<std::string, std::string> bytes_by_name(const fs::path& folder) {
  std::map<std::string, std::string> all;
  for (const auto& entry : fs::directory_iterator{folder})
    all[entry.path().filename().string()] = support::read_text(entry.path());
  return all;
}

std::vector<std::string> left_over(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator{folder})
    if (entry.path().filename().string().starts_with(".")) names.push_back(entry.path().string());
  return names;
}

}  // namespace

TEST_CASE("b111 an adapted weight gains scale·B·A, every other tensor keeps its bytes") {
  const support::TempFolder folder;
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    CAPTURE(c10::toString(type));
    const Base base{folder / (std::string{"base"} + c10::toString(type)), type};
    const bs::LoraAdapter adapter = base.adapter({.rank = 2, .alpha = 6, .top_fraction = 0.5});
    const auto output = base.folder / "merged";
    const auto report = bs::merge_adapter(bs::Checkpoint::open(base.folder), adapter, output);
    CHECK(report.merged == 1);
    CHECK(report.kept == 5);
    CHECK(report.files == 1);
    const auto merged = bs::Checkpoint::open(output);
    CHECK(merged.tensors().size() == base.tensors.size());
    for (const auto& [name, tensor] : base.tensors) {
      CAPTURE(name);
      const at::Tensor written = bs::load_tensor(merged, name);
      REQUIRE(written.scalar_type() == tensor.scalar_type());
      if (name != "layers.1.proj.weight") {
        CHECK(std::ranges::equal(bs::bytes_of(written), bs::bytes_of(tensor)));
        continue;
      }
      const auto& module = adapter.modules()[0];
      const at::Tensor exact =
          tensor.to(at::kDouble) +
          3 * at::mm(module.b.detach().to(at::kDouble), module.a.detach().to(at::kDouble));
      const double ulp = type == at::kBFloat16 ? 0x1p-8 : type == at::kHalf ? 0x1p-11 : 0x1p-22;
      CHECK(at::allclose(written.to(at::kDouble), exact, ulp, 1e-7));
      CHECK_FALSE(at::equal(written, tensor));
    }
    CHECK(support::read_text(output / "config.json") == "{\"model_type\": \"toy\"}\n");
    CHECK(fs::exists(output / "tokenizer.json"));
    CHECK_FALSE(fs::exists(output / "model.safetensors.index.json"));
  }
}

TEST_CASE("rank-stabilised scales and ranks of single modules are merged as they are used") {
  const support::TempFolder folder;
  const Base base{folder / "base"};
  bs::LoraAdapter adapter = base.adapter({.rank = 4, .alpha = 6, .use_rslora = true});
  std::vector<bs::LoraModule> modules{adapter.modules().begin(), adapter.modules().end()};
  modules[1].alpha = 10;  // a pattern
  adapter = {adapter.options(), 2, modules, adapter.saved_targets()};
  (void)bs::merge_adapter(bs::Checkpoint::open(base.folder), adapter, folder / "merged");
  const auto merged = bs::Checkpoint::open(folder / "merged");
  for (std::size_t i = 0; i < 2; ++i) {
    const std::string name = "layers." + std::to_string(i) + ".proj.weight";
    const at::Tensor delta = at::mm(modules[i].b.detach(), modules[i].a.detach());
    CHECK(at::allclose(bs::load_tensor(merged, name),
                       base.tensors.at(name) + (i == 0 ? 3.0 : 5.0) * delta, 1e-6, 1e-7));
  }
}

TEST_CASE("the same merge gives the same bytes, in shards of a bounded size with their index") {
  const support::TempFolder folder;
  const Base base{folder / "base"};
  const auto checkpoint = bs::Checkpoint::open(base.folder);
  const bs::LoraAdapter adapter = base.adapter({.rank = 2});
  const auto first =
      bs::merge_adapter(checkpoint, adapter, folder / "a", {.shard_byte_count = 170});
  (void)bs::merge_adapter(checkpoint, adapter, folder / "b", {.shard_byte_count = 170});
  (void)bs::merge_adapter(checkpoint, adapter, folder / "one");
  CHECK(bytes_by_name(folder / "a") == bytes_by_name(folder / "b"));
  CHECK(first.files > 2);
  CHECK(fs::exists(folder / "a" / "model.safetensors.index.json"));
  CHECK(fs::exists(folder / "a" /
                   ("model-00001-of-0000" + std::to_string(first.files) + ".safetensors")));
  const auto sharded = bs::Checkpoint::open(folder / "a"),
             whole = bs::Checkpoint::open(folder / "one");
  CHECK(sharded.files().size() == first.files);
  CHECK(sharded.warnings().empty());
  for (const auto& path : sharded.files()) {
    std::uint64_t bytes = 0, count = 0;
    for (const auto& tensor : bs::read_safetensors_header(path).tensors) {
      bytes += tensor.range.byte_count;
      ++count;
    }
    CHECK((bytes <= 170 || count == 1));
  }
  for (const auto& tensor : whole.tensors())
    CHECK(at::equal(bs::load_tensor(sharded, tensor.spec.name),
                    bs::load_tensor(whole, tensor.spec.name)));
}

TEST_CASE("a merge that fails leaves nothing, whatever it had written") {
  const support::TempFolder folder;
  const Base base{folder / "base"};
  const auto checkpoint = bs::Checkpoint::open(base.folder);
  const bs::LoraAdapter adapter = base.adapter({.rank = 2});
  bs::MergeOptions options{.shard_byte_count = 100};
  for (int at = 1; at <= 6; ++at) {
    int calls = 0;
    options.progress = [&](std::uint64_t, std::uint64_t) {
      if (++calls == at) throw std::runtime_error{"enough"};
    };
    CHECK_THROWS_AS(bs::merge_adapter(checkpoint, adapter, folder / "out", options),
                    std::runtime_error);
    CHECK_FALSE(fs::exists(folder / "out"));
    CHECK(left_over(folder.path()).empty());
  }
  // What a killed merge left is replaced; a folder with something in it is not.
  fs::create_directories(folder / ".out.merging");
  support::write_text(folder / ".out.merging/model.safetensors", "half");
  fs::create_directories(folder / "out");
  (void)bs::merge_adapter(checkpoint, adapter, folder / "out/");
  CHECK(left_over(folder.path()).empty());
  const auto before = bytes_by_name(folder / "out");
  CHECK_THROWS_WITH(bs::merge_adapter(checkpoint, adapter, folder / "out"),
                    ContainsSubstring("not empty"));
  CHECK(bytes_by_name(folder / "out") == before);
}

TEST_CASE(
    "a merge replaces no file and no link to nothing, and follows a link to an empty folder") {
  const support::TempFolder folder;
  const Base base{folder / "base"};
  const auto checkpoint = bs::Checkpoint::open(base.folder);
  const bs::LoraAdapter adapter = base.adapter({.rank = 2});
  const auto refused = [&](const fs::path& output, const std::string& says) {
    CHECK_THROWS_WITH(bs::merge_adapter(checkpoint, adapter, output),
                      ContainsSubstring(output.filename().string()) && ContainsSubstring(says));
  };
  support::write_text(folder / "empty", "");
  support::write_text(folder / "full", "mine");
  for (const char* name : {"empty", "full"}) refused(folder / name, "no folder");
  CHECK(fs::is_regular_file(folder / "empty"));
  CHECK(support::read_text(folder / "full") == "mine");
  fs::create_directories(folder / "elsewhere/target");
  std::error_code cannot;  // some systems ask for a privilege
  fs::create_directory_symlink(folder / "elsewhere/target", folder / "link", cannot);
  if (cannot) return;
  fs::create_directory_symlink(folder / "elsewhere/none", folder / "dangling");
  refused(folder / "dangling", "a link to nothing");
  CHECK_THROWS_AS(bs::merge_adapter(checkpoint, adapter, folder / "dangling/"), bs::Error);
  CHECK(fs::is_symlink(folder / "dangling"));
  CHECK_FALSE(fs::exists(folder / "elsewhere/none"));
  // A link where the folder would be made leads nowhere that is cleared.
  fs::create_directory_symlink(base.folder, folder / "elsewhere/.target.merging");
  (void)bs::merge_adapter(checkpoint, adapter, folder / "link");
  CHECK(fs::is_symlink(folder / "link"));
  CHECK(fs::exists(folder / "elsewhere/target/model.safetensors"));
  CHECK(fs::exists(base.folder / "model.safetensors"));
  CHECK(left_over(folder.path()).empty());
  CHECK(left_over(folder / "elsewhere").empty());
}

TEST_CASE("a folder that another merge makes is refused and left alone") {
  const support::TempFolder folder;
  const Base base{folder / "base"};
  const auto checkpoint = bs::Checkpoint::open(base.folder);
  const bs::LoraAdapter adapter = base.adapter({.rank = 2});
  int calls = 0;
  bs::MergeOptions options{.shard_byte_count = 100};
  options.progress = [&](std::uint64_t, std::uint64_t) {
    ++calls;
    CHECK_THROWS_WITH(bs::merge_adapter(checkpoint, adapter, folder / "out", {}),
                      ContainsSubstring("in use by another process"));
  };
  (void)bs::merge_adapter(checkpoint, adapter, folder / "out", options);
  CHECK(calls > 2);
  (void)bs::merge_adapter(checkpoint, adapter, folder / "alone", {.shard_byte_count = 100});
  CHECK(bytes_by_name(folder / "out") == bytes_by_name(folder / "alone"));
  CHECK(left_over(folder.path()).empty());
}

TEST_CASE("a sum that its type does not hold is refused with the tensor") {
  const support::TempFolder folder;
  const Base base{folder / "base", at::kHalf};
  bs::LoraAdapter adapter = base.adapter({.rank = 2});
  {
    const c10::NoGradGuard no_grad;
    at::Tensor{adapter.modules()[1].a}.fill_(1e3);
    at::Tensor{adapter.modules()[1].b}.fill_(1e3);
  }
  CHECK_THROWS_WITH(bs::merge_adapter(bs::Checkpoint::open(base.folder), adapter, folder / "out"),
                    ContainsSubstring("layers.1.proj.weight") && ContainsSubstring("F16"));
  CHECK_FALSE(fs::exists(folder / "out"));
}

TEST_CASE("weights that are no plain floats are not merged") {
  const support::TempFolder folder;
  Base base{folder / "base"};
  const bs::LoraAdapter adapter = base.adapter({.rank = 2});
  base.add("layers.0.proj.weight", at::zeros({5, 7}, at::kChar));
  base.write();
  CHECK_THROWS_WITH(bs::merge_adapter(bs::Checkpoint::open(base.folder), adapter, folder / "out"),
                    ContainsSubstring("layers.0.proj.weight") && ContainsSubstring("I8"));
  base.add("layers.0.proj.weight", at::zeros({7, 5}));
  base.write();
  CHECK_THROWS_WITH(bs::merge_adapter(bs::Checkpoint::open(base.folder), adapter, folder / "out"),
                    ContainsSubstring("[7, 5]"));
}

TEST_CASE("b24 memory does not grow with the tensors, and pieces of rows meet without a seam") {
  const support::TempFolder folder;
  constexpr std::int64_t rows = 40000, columns = 1024;  // 80 MB in fp16, 160 MB in fp32
  {
    std::ofstream{folder / "model.safetensors"};
    const std::vector<bs::TensorSpec> specs{
        {"layers.0.proj.weight", bs::DType::f16, {rows, columns}}};
    bs::SafetensorsStream out{folder / "model.safetensors", specs};
    const at::Tensor row = at::arange(columns, at::kHalf).div(1024).contiguous();
    for (std::int64_t i = 0; i < rows; ++i) out.append(bs::bytes_of(row));
    out.commit();
  }
  const std::vector<bs::LoraBlock> sites{{"layers.0", {{"proj.weight", {rows, columns}, true}}}};
  bs::LoraAdapter adapter = bs::make_lora_adapter(sites, {.rank = 1, .alpha = 1}, at::kCPU);
  {
    const c10::NoGradGuard no_grad;
    at::Tensor{adapter.modules()[0].a}.fill_(1);
    at::Tensor{adapter.modules()[0].b}.copy_(at::arange(rows).remainder(7).unsqueeze(1));
  }
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const std::int64_t before = support::peak_kibibytes();
  (void)bs::merge_adapter(checkpoint, adapter, folder / "out");
  CHECK(support::peak_kibibytes() - before < 40 * 1024);  // 2 MiB and copies of it in fp32
  const at::Tensor merged =
      bs::load_tensor(bs::Checkpoint::open(folder / "out"), "layers.0.proj.weight");
  const at::Tensor expected = at::arange(columns, at::kHalf).div(1024).to(at::kFloat).unsqueeze(0) +
                              at::arange(rows).remainder(7).unsqueeze(1);
  CHECK(at::equal(merged, expected.to(at::kHalf)));
}
