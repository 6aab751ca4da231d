// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/checkpoint.hpp>

#include <support/safetensors_files.hpp>

#include <array>
#include <functional>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

void put_index(const fs::path& folder, std::string_view weight_map) {
  support::write_text(
      folder / "model.safetensors.index.json",
      "{\"metadata\":{\"total_size\":9},\"weight_map\":" + std::string{weight_map} + "}");
}

/// Three shards with tensors a, b, c of one shard each.
void put_three_shards(const fs::path& folder) {
  const std::array<std::vector<support::RawTensor>, 3> shards{
      {{support::raw_tensor("a", "U8", {5})},
       {support::raw_tensor("b", "F32", {2}), support::raw_tensor("b2", "U8", {1})},
       {support::raw_tensor("c", "BF16", {3})}}};
  support::write_shards(folder, shards);
}

/// False, with a warning, where the system lets nobody make links.
bool make_link(const fs::path& target, const fs::path& link) {
  std::error_code error;
  fs::create_symlink(target, link, error);
  if (error) WARN("skipped: this system makes no links: " << error.message());
  return !error;
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const bs::Error& error) {
    return error.what();
  }
  return "nothing thrown";
}

}  // namespace

TEST_CASE("shards open through their index, tensors sorted and found by name") {
  const support::TempFolder folder;
  put_three_shards(folder.path());
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  REQUIRE(checkpoint.tensors().size() == 4);
  CHECK(checkpoint.folder() == folder.path());
  CHECK(checkpoint.warnings().empty());
  for (const char* name : {"a", "b", "b2", "c"}) {
    const bs::StoredTensor& tensor = checkpoint.at(name);
    CHECK(tensor.spec.name == name);
    CHECK(support::read_text(checkpoint.files()[tensor.file])
              .substr(tensor.range.offset, tensor.range.byte_count) ==
          support::pattern_bytes(name, tensor.range.byte_count));
  }
  CHECK(checkpoint.find("") == nullptr);
  CHECK(checkpoint.find("aa") == nullptr);
  CHECK(checkpoint.find("z") == nullptr);
  CHECK(checkpoint.with_prefix("b").size() == 2);
  CHECK(checkpoint.with_prefix("").size() == 4);
  CHECK(checkpoint.with_prefix("d").empty());
}

TEST_CASE("a single file opens as a folder and by itself") {
  const support::TempFolder folder;
  const std::array tensors{support::raw_tensor("a", "U8", {5})};
  support::write_safetensors_file(folder / "model.safetensors", tensors);
  CHECK(bs::Checkpoint::open(folder.path()).files().size() == 1);
  const auto checkpoint = bs::Checkpoint::open(folder / "model.safetensors");
  CHECK(checkpoint.folder() == folder.path());
  CHECK(checkpoint.at("a").range.byte_count == 5);
  fs::rename(folder / "model.safetensors", folder / "other.safetensors");
  CHECK(bs::Checkpoint::open(folder.path()).tensors().size() == 1);
}

TEST_CASE("a hub snapshot of links opens like a folder, a broken link is named") {
  const support::TempFolder cache;
  const fs::path blobs = cache / "blobs";
  const fs::path snapshot = cache.path() / "snapshots" / "0123";
  fs::create_directories(blobs);
  fs::create_directories(snapshot);
  put_three_shards(blobs);
  int number = 0;
  for (const auto& entry : fs::directory_iterator{blobs}) {
    const fs::path blob = blobs / ("sha" + std::to_string(number++));
    const fs::path name = entry.path().filename();
    fs::rename(entry.path(), blob);
    if (!make_link(fs::path{"../../blobs"} / blob.filename(), snapshot / name)) return;
  }
  const auto checkpoint = bs::Checkpoint::open(snapshot);
  CHECK(checkpoint.tensors().size() == 4);
  CHECK(checkpoint.folder() == snapshot);
  CHECK_THAT(message_of([&] { static_cast<void>(bs::Checkpoint::open(cache.path())); }),
             ContainsSubstring("snapshots"));
  const fs::path second = snapshot / support::shard_name(1, 3);
  fs::remove(snapshot / fs::read_symlink(second));
  CHECK_THAT(message_of([&] { static_cast<void>(bs::Checkpoint::open(snapshot)); }),
             ContainsSubstring(second.string()) && ContainsSubstring("leads nowhere") &&
                 ContainsSubstring("'b'"));
}

TEST_CASE("b17 a shard that is missing refuses the checkpoint, naming file and tensor") {
  const support::TempFolder folder;
  put_three_shards(folder.path());
  const fs::path second = folder / support::shard_name(1, 3);
  fs::remove(second);
  CHECK_THAT(message_of([&] { static_cast<void>(bs::Checkpoint::open(folder.path())); }),
             ContainsSubstring(second.string()) && ContainsSubstring("missing") &&
                 ContainsSubstring("'b'"));
}

TEST_CASE("b17 a shard without an indexed tensor refuses its use, naming file and tensor") {
  const support::TempFolder folder;
  put_three_shards(folder.path());
  const std::array less{support::raw_tensor("b2", "U8", {1})};
  support::write_safetensors_file(folder / support::shard_name(1, 3), less);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  REQUIRE(checkpoint.warnings().size() == 1);
  CHECK_THAT(checkpoint.warnings()[0],
             ContainsSubstring("'b'") && ContainsSubstring(support::shard_name(1, 3)));
  CHECK(checkpoint.find("b") == nullptr);
  CHECK_THROWS_AS(checkpoint.at("b"), bs::BindingError);
  CHECK_THAT(
      message_of([&] { static_cast<void>(checkpoint.at("b")); }),
      ContainsSubstring((folder / support::shard_name(1, 3)).string()) && ContainsSubstring("'b'"));
}

TEST_CASE("b19 files that the index does not mention are reported, not read") {
  const support::TempFolder folder;
  put_three_shards(folder.path());
  put_index(folder.path(), "{\"a\":\"" + support::shard_name(0, 3) + "\"}");
  support::write_text(folder / support::shard_name(2, 3), "garbage that is never opened");
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  CHECK(checkpoint.tensors().size() == 1);
  CHECK(checkpoint.files().size() == 1);
  REQUIRE(checkpoint.warnings().size() == 2);
  CHECK_THAT(checkpoint.warnings()[0], ContainsSubstring(support::shard_name(1, 3)));
}

TEST_CASE("tensors of an older split are left to the file that the index names") {
  const support::TempFolder folder;
  const std::array<std::vector<support::RawTensor>, 2> shards{
      {{support::raw_tensor("a", "U8", {5}), support::raw_tensor("b", "U8", {4})},
       {support::raw_tensor("b", "U8", {9})}}};
  support::write_shards(folder.path(), shards);
  put_index(folder.path(), "{\"a\":\"" + support::shard_name(0, 2) + "\",\"b\":\"" +
                               support::shard_name(1, 2) + "\"}");
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  CHECK(checkpoint.at("b").range.byte_count == 9);
  CHECK(checkpoint.warnings().size() == 1);
  put_index(folder.path(), "{\"a\":\"" + support::shard_name(0, 2) + "\",\"x\":\"" +
                               support::shard_name(1, 2) + "\"}");
  CHECK_THAT(message_of([&] { static_cast<void>(bs::Checkpoint::open(folder.path())); }),
             ContainsSubstring("'b' is also in"));
}

TEST_CASE("b19 total_size is never looked at, and metadata may be anything") {
  const support::TempFolder folder;
  put_three_shards(folder.path());
  for (const char* metadata : {"{\"total_size\":-1}", "null", "[]", "{\"total_size\":\"x\"}"}) {
    const std::string one = "\":\"" + support::shard_name(0, 3) + "\"";
    support::write_text(
        folder / "model.safetensors.index.json",
        "{\"metadata\":" + std::string{metadata} + ",\"weight_map\":{\"a" + one + "}}");
    CHECK(bs::Checkpoint::open(folder.path()).tensors().size() == 1);
  }
}

TEST_CASE("an index that reaches out of its folder or is malformed is refused") {
  const support::TempFolder folder;
  put_three_shards(folder.path());
  fs::create_directories(folder / "sub");
  for (const char* file : {"../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "",
                           "a\\\\b", "x\\u0000.safetensors"}) {
    INFO(file);
    put_index(folder.path(), "{\"t\":\"" + std::string{file} + "\"}");
    CHECK_THROWS_WITH(bs::Checkpoint::open(folder.path()),
                      ContainsSubstring("'t'") && ContainsSubstring("no plain file name"));
  }
  for (const char* map : {"{}", "[]", "null", "1", "{\"t\":1}", "{\"t\":null}",
                          R"({"t":"a.safetensors","t":"b.safetensors"})"}) {
    INFO(map);
    put_index(folder.path(), map);
    CHECK_THROWS_AS(bs::Checkpoint::open(folder.path()), bs::FormatError);
  }
  for (const char* text : {"", "{", "[]", "{}", "{\"weight_map\":{\"a\":\"b\"", "\xff"}) {
    INFO(text);
    support::write_text(folder / "model.safetensors.index.json", text);
    CHECK_THROWS_AS(bs::Checkpoint::open(folder.path()), bs::FormatError);
  }
  support::write_text(folder / "model.safetensors.index.json", std::string(100'000, '['));
  CHECK_THROWS_WITH(bs::Checkpoint::open(folder.path()), ContainsSubstring("nested deeper"));
  support::write_text(folder / "model.safetensors.index.json",
                      "version https://git-lfs.github.com/spec/v1\n");
  CHECK_THROWS_WITH(bs::Checkpoint::open(folder.path()), ContainsSubstring("Git LFS"));
}

TEST_CASE("sub-folders are never searched") {
  const support::TempFolder folder;
  const std::array tensors{support::raw_tensor("a", "U8", {5})};
  fs::create_directories(folder / "original");
  support::write_safetensors_file(folder / "original" / "model.safetensors", tensors);
  CHECK_THROWS_WITH(bs::Checkpoint::open(folder.path()), ContainsSubstring("no model.safetensors"));
}

TEST_CASE("b152 four ways of missing have four messages") {
  const support::TempFolder folder;
  put_three_shards(folder.path());
  const auto missing = [&](std::string_view name) {
    return message_of([&] { static_cast<void>(bs::Checkpoint::open(folder.path()).at(name)); });
  };
  const std::string not_indexed = missing("zz");
  CHECK_THAT(not_indexed,
             ContainsSubstring("'zz' is not in the index") && ContainsSubstring("config.json"));
  fs::rename(folder / support::shard_name(2, 3), folder / "away");
  const std::string absent_file = missing("c");
  CHECK_THAT(absent_file, ContainsSubstring(support::shard_name(2, 3)) &&
                              ContainsSubstring("download it again"));
  const std::array other{support::raw_tensor("d", "U8", {1})};
  support::write_safetensors_file(folder / support::shard_name(2, 3), other);
  const std::string lacks = missing("c");
  CHECK_THAT(lacks, ContainsSubstring("although the index places it there") &&
                        ContainsSubstring(support::shard_name(2, 3)) &&
                        ContainsSubstring("download"));
  fs::remove(folder / "model.safetensors.index.json");
  const std::string no_index = missing("c");
  CHECK_THAT(no_index,
             ContainsSubstring(".safetensors files but no model.safetensors.index.json") &&
                 ContainsSubstring("download the index"));
  fs::rename(folder / support::shard_name(2, 3), folder / "model.safetensors");
  CHECK_THAT(missing("c"), ContainsSubstring("'c' is not in this file"));
}

TEST_CASE("b15 a tensor of unknown dtype is refused when used, with tensor, dtype and file") {
  const support::TempFolder folder;
  const std::array tensors{support::RawTensor{"odd", "F6_X", {4}, 3, {}},
                           support::raw_tensor("plain", "F8_E4M3", {2})};
  support::write_safetensors_file(folder / "model.safetensors", tensors);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  CHECK(checkpoint.at("plain").spec.dtype == bs::DType::f8_e4m3);
  CHECK(checkpoint.find("odd") == nullptr);
  REQUIRE(checkpoint.unsupported().size() == 1);
  CHECK_THROWS_AS(checkpoint.at("odd"), bs::UnsupportedError);
  CHECK_THROWS_WITH(checkpoint.at("odd"),
                    ContainsSubstring("'odd'") && ContainsSubstring("F6_X") &&
                        ContainsSubstring((folder / "model.safetensors").string()));
}

TEST_CASE("paths that are nothing are refused by name") {
  const support::TempFolder folder;
  CHECK_THROWS_WITH(bs::Checkpoint::open(folder / "none"),
                    ContainsSubstring("no such folder or file"));
  if (!make_link("nowhere", folder / "model.safetensors")) return;
  CHECK_THROWS_WITH(bs::Checkpoint::open(folder.path()), ContainsSubstring("leads nowhere"));
  CHECK_THROWS_WITH(bs::Checkpoint::open(folder / "model.safetensors"),
                    ContainsSubstring("leads nowhere"));
}

TEST_CASE("model.safetensors counts before an index left beside it") {
  const support::TempFolder folder;
  put_three_shards(folder.path());
  const std::array tensors{support::raw_tensor("merged", "U8", {5})};
  support::write_safetensors_file(folder / "model.safetensors", tensors);
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  CHECK(checkpoint.tensors().size() == 1);
  CHECK(checkpoint.warnings().size() == 3);
}
