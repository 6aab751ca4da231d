// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/shard_manifest_reader.hpp>

#include <block_streamer/checkpoint/range_summer.hpp>
#include <block_streamer/checkpoint/shard_manifest_writer.hpp>

#include <support/safetensors_files.hpp>

#include <string>

#include <support/catch.hpp>

namespace bs = block_streamer;
using Json = nlohmann::json;

namespace {

bs::SummedRange summed(std::string name, std::vector<bs::FileRange> extents,
                       const std::string& bytes) {
  bs::SummedRange range{std::move(name), std::move(extents), 0, 0, {}};
  bs::RangeSummer summer{bs::checksum_chunk_byte_count};
  summer.append(std::as_bytes(std::span{bytes}));
  std::move(summer).finish(range);
  return range;
}

/// Two files, a block of three chunks, one of the other file, an empty one, a resident tensor.
bs::ShardManifest sample(bs::ShardLayout layout = bs::ShardLayout::packed) {
  bs::ShardManifest manifest;
  manifest.layout = layout;
  manifest.files = {{"a.safetensors", 300000, 0x12345678}, {"b.safetensors", 9000, 1}};
  manifest.blocks = {summed("l.0.", {{0, {4096, 150000}}}, support::pattern_bytes("x", 150000)),
                     summed("l.1.", {{1, {4096, 10}}}, support::pattern_bytes("y", 10)),
                     summed("l.2.", {}, {})};
  manifest.resident = {summed("embed", {{1, {8192, 808}}}, support::pattern_bytes("z", 808))};
  manifest.copied = {{"config.json", 17, 0}};
  return manifest;
}

std::string reason(const std::string& text) {
  try {
    static_cast<void>(bs::parse_shard_manifest("m.json", text));
  } catch (const bs::Error& error) {
    return error.what();
  }
  return "accepted";
}

struct Change {
  const char* pointer;
  const char* value;  ///< JSON; empty: removed
  const char* named;  ///< must stand in the message
};

std::string changed(const Change& change) {
  Json json = Json::parse(bs::format_shard_manifest(sample()));
  const Json::json_pointer pointer{change.pointer};
  if (std::string{change.value}.empty()) {
    json[pointer.parent_pointer()].erase(pointer.back());
  } else {
    json[pointer] = Json::parse(change.value);
  }
  return json.dump();
}

}  // namespace

TEST_CASE("a manifest that is written is read back the same") {
  for (const auto layout : {bs::ShardLayout::packed, bs::ShardLayout::original}) {
    const bs::ShardManifest manifest = sample(layout);
    REQUIRE(manifest.blocks[0].chunks.size() == 3);
    const std::string text = bs::format_shard_manifest(manifest);
    const bs::ShardManifest again = bs::parse_shard_manifest("m.json", text);
    CHECK(bs::format_shard_manifest(again) == text);
    CHECK(again.layout == layout);
    CHECK(again.blocks[0].chunks == manifest.blocks[0].chunks);
    CHECK(again.find_block("l.1.")->extents[0].range == bs::ByteRange{4096, 10});
    CHECK(again.find_block("l.9.") == nullptr);
  }
}

TEST_CASE("a manifest of a newer version is refused in a sentence, whatever else it holds") {
  CHECK(reason(changed({"/version", "2", ""})) ==
        "m.json: the manifest has version 2, this program reads up to version 1; use a newer "
        "block_streamer, or convert the model again");
  CHECK(reason(R"({"format":"block_streamer manifest","version":7})").find("version 7") !=
        std::string::npos);
  CHECK_THROWS_AS(bs::parse_shard_manifest("m", changed({"/version", "2", ""})),
                  bs::UnsupportedError);
}

TEST_CASE("keys that this version does not know are skipped") {
  Json json = Json::parse(bs::format_shard_manifest(sample()));
  json["later"] = {1, 2};
  json["blocks"][0]["compressed"] = false;
  CHECK(reason(json.dump()) == "accepted");
}

TEST_CASE("every field of a manifest is checked") {
  const Change change = GENERATE(
      Change{"/format", "\"x\"", "no manifest"}, Change{"/format", "", "no 'format'"},
      Change{"/version", "0", "version 0"}, Change{"/version", "1.5", "whole number"},
      Change{"/version", "-1", "whole number"}, Change{"/layout", "\"loose\"", "loose"},
      Change{"/algorithm", "\"md5\"", "algorithm"},
      Change{"/chunk_byte_count", "0", "power of two"},
      Change{"/chunk_byte_count", "65537", "power of two"},
      Change{"/chunk_byte_count", "2147483648", "power of two"},
      Change{"/chunk_byte_count", "4096", "chunk sums"}, Change{"/files", "{}", "no list"},
      Change{"/files/0", "3", "no object"}, Change{"/files/0/name", "\"../a\"", "plain file name"},
      Change{"/files/0/name", "\"\"", "plain file name"},
      Change{"/files/0/name", "\"a\\u0000\"", "plain file name"},
      Change{"/files/1/name", "\"a.safetensors\"", "twice"},
      Change{"/copied/0/name", "\"a.safetensors\"", "twice"},
      Change{"/files/0/byte_count", "\"9\"", "whole number"},
      Change{"/files/0/byte_count", "150000", "beyond its file"},
      Change{"/files/0/crc32c", "\"1234567\"", "eight"},
      Change{"/files/0/crc32c", "\"1234567G\"", "eight"}, Change{"/blocks", "", "no 'blocks'"},
      Change{"/blocks/1/name", "\"l.0.\"", "listed twice"},
      Change{"/blocks/0/name", "3", "no text"}, Change{"/blocks/0/byte_count", "", "byte_count"},
      Change{"/blocks/0/byte_count", "150001", "extents 150000"},
      Change{"/blocks/0/extents", "7", "no list"},
      Change{"/blocks/0/extents/0", "[0,1]", "[file, offset, byte_count]"},
      Change{"/blocks/0/extents/0", "[0,4096,-1]", "[file, offset, byte_count]"},
      Change{"/blocks/0/extents/0/0", "2", "not listed"},
      Change{"/blocks/0/extents/0/0", "4294967296", "not listed"},
      Change{"/blocks/0/extents/0/1", "18446744073709551615", "beyond its file"},
      Change{"/blocks/0/extents/0/1", "8", "multiple of 4096"},
      Change{"/blocks/0/extents/0/2", "0", "empty"},
      Change{"/blocks/0/extents", "[[0,4096,75000],[0,81920,75000]]", "more than one piece"},
      Change{"/blocks/0/chunks", "\"\"", "chunk sums"},
      Change{"/blocks/0/chunks", "\"0000000g0000000000000000\"", "hexadecimal"},
      Change{"/blocks/0/chunks", "\"000000000000000000000000\"", "do not make up"},
      Change{"/blocks/0/crc32c", "\"00000000\"", "do not make up"},
      Change{"/blocks/2/crc32c", "\"00000001\"", "do not make up"},
      Change{"/resident/0/crc32c", "null", "no text"});
  const std::string text = reason(changed(change));
  INFO(change.pointer << " = " << change.value << " gives: " << text);
  CHECK(text.find(change.named) != std::string::npos);
  CHECK(text.find("m.json") == 0);
}

TEST_CASE("extents of an original checkpoint may be many, in order") {
  Json json = Json::parse(bs::format_shard_manifest(sample(bs::ShardLayout::original)));
  json["blocks"][0]["extents"] = {{0, 7, 75000}, {0, 80000, 75000}};
  CHECK(reason(json.dump()) == "accepted");
  json["blocks"][0]["extents"] = {{0, 80000, 75000}, {0, 7, 75000}};
  CHECK(reason(json.dump()).find("not in order") != std::string::npos);
  json["blocks"][0]["extents"] = {{0, 7, 75000}, {0, 75006, 75000}};
  CHECK(reason(json.dump()).find("overlap") != std::string::npos);
}

TEST_CASE("text that is no manifest is refused, not misread") {
  for (const char* text : {"", "[]", "{", "null", "{\"format\":1}", "version https://git-lfs"}) {
    CHECK(reason(text).find("m.json") == 0);
  }
  const std::string good = bs::format_shard_manifest(sample());
  for (std::size_t cut = 0; cut < good.size(); cut += 97) {
    CHECK(reason(good.substr(0, cut)) != "accepted");
  }
}

TEST_CASE("a folder without a manifest has none") {
  const support::TempFolder folder;
  CHECK_FALSE(bs::find_shard_manifest(folder.path()));
  support::write_text(folder / bs::manifest_file_name, bs::format_shard_manifest(sample()));
  CHECK(bs::find_shard_manifest(folder.path())->files.size() == 2);
}
