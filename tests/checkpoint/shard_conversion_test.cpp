// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/shard_conversion.hpp>

#include <block_streamer/checkpoint/block_image_check.hpp>

#include <support/packed_model.hpp>
#include <support/safetensors_files.hpp>

#include <array>
#include <cstdlib>
#include <map>
#include <set>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

using support::fill_slot;
using Fixture = support::Conversion;
const std::vector<std::string> resident = support::resident_tensors();

[[nodiscard]] auto contents(const fs::path& folder) {
  return support::folder_contents(folder);
}

struct Stop {};  // thrown to end a conversion; no Error, so that nothing takes it for one

}  // namespace

TEST_CASE("blocks of a packed folder are the original's slots, contiguous and aligned") {
  Fixture f;
  const auto report = f.convert(f.packed);
  CHECK(report.files_written >= 2);
  const auto packed = bs::Checkpoint::open(f.packed);
  CHECK(packed.warnings().empty());
  for (const std::uint32_t granularity : {1, 512, 4096}) {
    const auto before = bs::make_block_map(*f.checkpoint, f.blocks, granularity);
    const auto after = bs::make_block_map(packed, f.blocks, granularity);
    for (std::size_t i = 0; i < f.blocks.size(); ++i) {
      const bs::BlockSource& source = after.blocks()[i];
      CHECK_FALSE(bs::validate(source.image));
      CHECK(fill_slot(after, i) == fill_slot(before, i));
      REQUIRE(source.extents.size() == 1);
      CHECK(source.extents[0].file_offset % 4096 == 0);
      CHECK(source.image.byte_count ==
            bs::round_up(source.image.layout.slot_byte_count[0], granularity));
      CHECK(source.image.segments.size() == 1);
      CHECK(source.extents[0].file_offset + source.image.byte_count <=
            fs::file_size(after.files()[source.extents[0].file]));
    }
  }
}

TEST_CASE("b25 a packed folder holds exactly the original's tensors, those outside the model too") {
  support::TinyModel model;
  model.tied = false;  // lm_head is not named: it is one of the others
  Fixture f{model, 1};
  auto tensors = support::model_tensors(model);
  tensors.push_back(support::raw_tensor("scalar", "F32", {}));
  tensors.push_back(support::raw_tensor("empty", "F32", {2, 0}));
  tensors.push_back(support::raw_tensor("strange", "F6_X", {5}));
  support::write_safetensors_file(f.source / "model.safetensors", tensors);
  f.checkpoint.emplace(bs::Checkpoint::open(f.source));
  f.convert(f.packed);
  const auto packed = bs::Checkpoint::open(f.packed);
  REQUIRE(packed.tensors().size() == f.checkpoint->tensors().size());
  for (const bs::StoredTensor& tensor : packed.tensors()) {
    CHECK(tensor.spec == f.checkpoint->at(tensor.spec.name).spec);
    const std::string file = support::read_text(packed.files()[tensor.file]);
    CHECK(file.substr(tensor.range.offset, tensor.range.byte_count) ==
          support::pattern_bytes(tensor.spec.name, tensor.range.byte_count));
  }
  REQUIRE(packed.unsupported().size() == 1);
  CHECK(packed.unsupported()[0].name == "strange");
  CHECK(packed.unsupported()[0].dtype == "F6_X");
  // The files obey the format's rules by themselves: all but the padding is the model's.
  for (const fs::path& file : packed.files()) {
    for (const auto& tensor : bs::read_safetensors_header(file).tensors) {
      if (bs::is_shard_padding(tensor.spec.name)) CHECK(tensor.range.byte_count < 4096);
    }
    CHECK(fs::file_size(file) % 4096 == 0);
  }
}

TEST_CASE("files stay within the size asked for, unless one block is larger") {
  Fixture f;
  for (const std::uint64_t limit :
       {std::uint64_t{1}, std::uint64_t{16} << 10, std::uint64_t{40} << 10}) {
    f.shard_options.shard_byte_count = limit;
    for (const bs::PackedShard& shard :
         bs::plan_shards(*f.checkpoint, f.blocks, resident, f.shard_options)) {
      CHECK((shard.byte_count <= limit || shard.groups.size() == 1));
    }
  }
  f.shard_options.shard_byte_count = 1 << 30;
  CHECK(bs::plan_shards(*f.checkpoint, f.blocks, resident, f.shard_options).size() == 1);
}

TEST_CASE("a conversion of the type converts the model's tensors and its configuration") {
  Fixture f;
  f.shard_options.dtype = bs::DType::f32;
  f.convert(f.packed);
  const auto packed = bs::Checkpoint::open(f.packed);
  const bs::StoredTensor& wide = packed.at("model.layers.1.mlp.up_proj.weight");
  const bs::StoredTensor& stored = f.checkpoint->at(wide.spec.name);
  CHECK(wide.spec.dtype == bs::DType::f32);
  CHECK(wide.spec.shape == stored.spec.shape);
  std::string expected(wide.range.byte_count, '\0');
  const std::string bytes = support::pattern_bytes(wide.spec.name, stored.range.byte_count);
  bs::convert_floats(bs::DType::bf16, std::as_bytes(std::span{bytes}), bs::DType::f32,
                     std::as_writable_bytes(std::span{expected}));
  CHECK(support::read_text(packed.files()[wide.file])
            .substr(wide.range.offset, wide.range.byte_count) == expected);
  const std::string config = support::read_text(f.packed / "config.json");
  CHECK(config.find("\"torch_dtype\": \"float32\"") != std::string::npos);
  CHECK(bs::verify_manifest(f.packed, *packed.manifest()).empty());
}

TEST_CASE("the other files come along, weights of other formats do not") {
  Fixture f;
  const auto report = f.convert(f.packed);
  CHECK(support::read_text(f.packed / "config.json") ==
        support::read_text(f.source / "config.json"));
  CHECK(support::read_text(f.packed / "tokenizer.json") == "{\"a\": 1}");
  CHECK_FALSE(fs::exists(f.packed / "weights.bin"));
  CHECK(report.manifest.copied.size() == 2);
  CHECK_FALSE(fs::exists(f.packed / bs::journal_file_name));
}

TEST_CASE("b24 a conversion stopped anywhere goes on and ends with the same bytes") {
  Fixture f;
  f.convert(f.packed);
  const auto expected = contents(f.packed);
  for (std::uint64_t calls = 0;; ++calls) {
    const fs::path folder = f.folder / ("stopped" + std::to_string(calls));
    std::uint64_t left = calls;
    bs::ConversionOptions options;
    options.progress = [&](std::uint64_t, std::uint64_t) {
      if (left-- == 0) throw Stop{};
    };
    bool stopped = false;
    try {
      f.convert(folder, options);
    } catch (const Stop&) {
      stopped = true;
    }
    if (!stopped) break;
    CHECK_THROWS_WITH(bs::Checkpoint::open(folder), ContainsSubstring("has not ended"));
    f.convert(folder);
    CHECK(contents(folder) == expected);
  }
}

TEST_CASE("a resumed conversion checks the files it keeps and writes damaged ones again") {
  Fixture f;
  f.convert(f.packed);
  const auto expected = contents(f.packed);
  const fs::path folder = f.folder / "damaged";
  bs::ConversionOptions options;
  options.progress = [&](std::uint64_t done, std::uint64_t all) {
    if (done > all * 3 / 4) throw Stop{};
  };
  CHECK_THROWS_AS(f.convert(folder, options), Stop);
  const fs::path first = folder / expected.lower_bound("model-")->first;
  std::string text = support::read_text(first);
  text[text.size() / 2] ^= 1;
  support::write_text(first, text);
  const auto report = f.convert(folder);
  CHECK(report.files_kept >= 1);
  CHECK(report.files_written >= 2);  // the damaged one and what was missing
  CHECK(contents(folder) == expected);
}

TEST_CASE("nothing that somebody else put there is replaced") {
  Fixture f;
  SECTION("a finished conversion, unless asked to; the same again is done already") {
    const auto first = f.convert(f.packed);
    const auto before = contents(f.packed);
    support::write_text(f.packed / bs::journal_file_name, "{}");  // killed before it was removed
    const auto again = f.convert(f.packed);
    CHECK(again.files_written == 0);
    CHECK(again.files_kept == first.files_written);
    CHECK(again.byte_count == first.byte_count);
    CHECK(contents(f.packed) == before);
    CHECK(f.convert(f.packed, {.overwrite = true}).files_kept == 0);
    CHECK(contents(f.packed) == before);
    CHECK(bs::Checkpoint::open(f.packed).warnings().empty());
  }
  SECTION("a conversion with other options, unless asked to: no file of it stays") {
    f.shard_options.shard_byte_count = 1;
    f.convert(f.packed);
    f.shard_options.shard_byte_count = 1 << 30;
    CHECK_THROWS_WITH(f.convert(f.packed), ContainsSubstring("--overwrite"));
    f.convert(f.packed, {.overwrite = true});
    const auto checkpoint = bs::Checkpoint::open(f.packed);
    CHECK(checkpoint.files().size() == 1);
    CHECK(checkpoint.warnings().empty());
  }
  SECTION("an unfinished conversion of another model") {
    bs::ConversionOptions stop;
    stop.progress = [](std::uint64_t, std::uint64_t) { throw Stop{}; };
    CHECK_THROWS_AS(f.convert(f.packed, stop), Stop);
    f.shard_options.shard_byte_count = 1 << 30;
    CHECK_THROWS_WITH(f.convert(f.packed), ContainsSubstring("other options"));
    CHECK_NOTHROW(f.convert(f.packed, {.overwrite = true}));
  }
  SECTION("but what a run that was killed at once left is removed") {
    fs::create_directories(f.packed);
    const std::string left = "." + std::string{bs::journal_file_name} + ".part123-0";
    support::write_text(f.packed / left, "{");
    f.convert(f.packed);
    CHECK_FALSE(fs::exists(f.packed / left));
  }
  SECTION("other files, unless asked to") {
    fs::create_directories(f.packed);
    support::write_text(f.packed / "notes.md", "mine");
    CHECK_THROWS_WITH(f.convert(f.packed), ContainsSubstring("not empty"));
    f.convert(f.packed, {.overwrite = true});
    CHECK(support::read_text(f.packed / "notes.md") == "mine");
  }
  SECTION("original weights, not even then, and not with a manifest of checksums beside them") {
    support::write_tiny_model(f.packed, f.model, 2);
    const auto original = bs::Checkpoint::open(f.packed);
    support::write_text(
        f.packed / bs::manifest_file_name,
        bs::format_shard_manifest(bs::sum_checkpoint(original, f.blocks, resident)));
    const auto before = contents(f.packed);
    CHECK_THROWS_WITH(f.convert(f.packed, {.overwrite = true}), ContainsSubstring("other weights"));
    CHECK(contents(f.packed) == before);
  }
  SECTION("the model's own folder") {
    CHECK_THROWS_WITH(f.convert(f.source, {.overwrite = true}),
                      ContainsSubstring("its own folder"));
  }
}

TEST_CASE("a replacement that is stopped leaves an unfinished folder, not a mixed one") {
  Fixture f;
  f.convert(f.packed);
  f.shard_options.dtype = bs::DType::f32;
  bs::ConversionOptions options;
  options.overwrite = true;
  options.progress = [&](std::uint64_t done, std::uint64_t all) {
    if (done > all / 2) throw Stop{};
  };
  CHECK_THROWS_AS(f.convert(f.packed, options), Stop);
  CHECK_THROWS_WITH(bs::Checkpoint::open(f.packed), ContainsSubstring("has not ended"));
  CHECK(f.convert(f.packed).files_kept > 0);
  CHECK(bs::verify_manifest(f.packed, *bs::Checkpoint::open(f.packed).manifest()).empty());
}

TEST_CASE("a source that changed since is converted from the start") {
  Fixture f;
  bs::ConversionOptions options;
  options.progress = [&](std::uint64_t done, std::uint64_t all) {
    if (done > all / 2) throw Stop{};
  };
  CHECK_THROWS_AS(f.convert(f.packed, options), Stop);
  fs::last_write_time(
      f.source / support::shard_name(0, 2),
      fs::last_write_time(f.source / support::shard_name(0, 2)) + std::chrono::seconds{5});
  CHECK_THROWS_WITH(f.convert(f.packed), ContainsSubstring("--overwrite"));
}

TEST_CASE("one flipped bit anywhere in a packed folder is found and named") {
  Fixture f;
  f.convert(f.packed);
  const auto manifest = *bs::Checkpoint::open(f.packed).manifest();
  REQUIRE(bs::verify_manifest(f.packed, manifest).empty());
  std::uint32_t x = 1;
  for (const auto& [name, text] : contents(f.packed)) {
    if (name == bs::manifest_file_name || name.ends_with(".index.json")) continue;
    for (int i = 0; i < 5; ++i) {
      std::string damaged = text;
      x = x * 1664525 + 1013904223;
      damaged[x % damaged.size()] ^= static_cast<char>(1 << (x >> 29));
      support::write_text(f.packed / name, damaged);
      const auto faults = bs::verify_manifest(f.packed, manifest);
      REQUIRE_FALSE(faults.empty());
      CHECK(faults[0].find(name) != std::string::npos);
      CHECK(faults[0].find("expected") != std::string::npos);
    }
    support::write_text(f.packed / name, text);
  }
  const bs::SummedRange& block = manifest.blocks[1];
  const fs::path file = f.packed / manifest.files[block.extents[0].file].name;
  std::string text = support::read_text(file);
  text[block.extents[0].range.offset + 100] ^= 1;
  support::write_text(file, text);
  CHECK_THROWS_WITH(bs::verify_range(f.packed, manifest, block),
                    ContainsSubstring("model.layers.1., chunk at 0): checksum "));
  CHECK(bs::verify_manifest(f.packed, manifest).size() == 2);  // the file, and the block in it
}

TEST_CASE("checksums of an original checkpoint find a changed byte and no more") {
  Fixture f{{}, 3};  // blocks straddle files
  const auto manifest = bs::sum_checkpoint(*f.checkpoint, f.blocks, resident);
  support::write_text(f.source / bs::manifest_file_name, bs::format_shard_manifest(manifest));
  const auto again = bs::Checkpoint::open(f.source);
  REQUIRE(again.manifest() != nullptr);
  CHECK(again.warnings().empty());
  CHECK(bs::verify_manifest(f.source, *again.manifest()).empty());
  const bs::StoredTensor& tensor = again.at("model.layers.2.mlp.down_proj.weight");
  std::string text = support::read_text(again.files()[tensor.file]);
  text[tensor.range.offset] ^= 4;
  support::write_text(again.files()[tensor.file], text);
  const auto faults = bs::verify_manifest(f.source, *again.manifest());
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].find("model.layers.2.") != std::string::npos);
}

TEST_CASE("checksums that belong to other files are put aside with a warning") {
  Fixture f{{}, 1};
  const auto manifest = bs::sum_checkpoint(*f.checkpoint, f.blocks, resident);
  support::write_text(f.source / bs::manifest_file_name, bs::format_shard_manifest(manifest));
  support::TinyModel other;
  other.layers = 4;
  support::write_tiny_model(f.source, other, 1);
  const auto again = bs::Checkpoint::open(f.source);
  CHECK(again.manifest() == nullptr);
  REQUIRE(again.warnings().size() == 1);
  CHECK(again.warnings()[0].find("checksums are not used") != std::string::npos);
}

TEST_CASE("a packed folder whose file or manifest is not what it was is refused at open") {
  Fixture f;
  f.convert(f.packed);
  const auto manifest = *bs::Checkpoint::open(f.packed).manifest();
  SECTION("a file was replaced") {
    const std::array tensors{support::raw_tensor("a", "U8", {7})};
    support::write_safetensors_file(f.packed / manifest.files[0].name, tensors);
    CHECK_THROWS_WITH(bs::Checkpoint::open(f.packed), ContainsSubstring("convert"));
  }
  SECTION("a file is missing") {
    fs::remove(f.packed / manifest.files[1].name);
    CHECK_THROWS_AS(bs::Checkpoint::open(f.packed), bs::StorageError);
  }
  SECTION("the manifest is of a newer version") {
    std::string text = support::read_text(f.packed / bs::manifest_file_name);
    text.replace(text.find("\"version\": 1"), 12, "\"version\": 2");
    support::write_text(f.packed / bs::manifest_file_name, text);
    CHECK_THROWS_AS(bs::Checkpoint::open(f.packed), bs::UnsupportedError);
  }
  SECTION("the manifest is cut") {
    const std::string text = support::read_text(f.packed / bs::manifest_file_name);
    support::write_text(f.packed / bs::manifest_file_name, text.substr(0, text.size() / 2));
    CHECK_THROWS_AS(bs::Checkpoint::open(f.packed), bs::FormatError);
  }
}

TEST_CASE("a tensor in two blocks cannot be packed and is named") {
  Fixture f;
  f.blocks.push_back({"model.", {"layers.0.mlp.up_proj.weight"}});
  CHECK_THROWS_WITH(f.convert(f.packed), ContainsSubstring("model.layers.0.mlp.up_proj.weight"));
}

TEST_CASE("a packed folder can be packed again") {
  Fixture f;
  f.convert(f.packed);
  const auto packed = bs::Checkpoint::open(f.packed);
  const fs::path again = f.folder / "again";
  bs::convert_to_shards(packed, f.blocks, resident, again, f.shard_options);
  auto one = contents(again);
  auto other = contents(f.packed);
  one.erase(std::string{bs::manifest_file_name});  // names the conversion, not only its result
  other.erase(std::string{bs::manifest_file_name});
  CHECK(one == other);
}
