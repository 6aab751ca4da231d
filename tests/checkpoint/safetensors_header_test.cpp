// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/safetensors_header.hpp>

#include <support/safetensors_files.hpp>

#include <support/peak_memory.hpp>

#include <array>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::entry_json;
using support::raw_file;

namespace {

/// The message of the refusal of a file with these bytes; empty if it is accepted.
std::string refusal(std::string_view bytes) {
  const support::TempFolder folder;
  support::write_text(folder / "model.safetensors", bytes);
  try {
    static_cast<void>(bs::read_safetensors_header(folder / "model.safetensors"));
  } catch (const bs::FormatError& error) {
    CHECK(std::string{error.what()}.find((folder / "model.safetensors").string()) == 0);
    return std::string{error.what()}.substr((folder / "model.safetensors").string().size());
  }
  return {};
}

bs::SafetensorsHeader accept(std::string_view bytes) {
  const support::TempFolder folder;
  support::write_text(folder / "model.safetensors", bytes);
  return bs::read_safetensors_header(folder / "model.safetensors");
}

/// A file whose header lists one tensor `t`, over `data_size` bytes.
std::string one_tensor(std::string_view dtype, std::string_view shape, std::string_view begin,
                       std::string_view end, std::size_t data_size) {
  return raw_file("{" + entry_json("t", dtype, shape, begin, end) + "}",
                  std::string(data_size, 'd'));
}

std::string good_file() {
  const std::array tensors{support::raw_tensor("a", "F32", {2, 3}),
                           support::raw_tensor("b", "BF16", {5})};
  return support::safetensors_bytes(tensors);
}

}  // namespace

TEST_CASE("b03 the data begins exactly after the header, whatever its length") {
  const std::uint64_t remainder = GENERATE(range(0, 8));
  const std::array tensors{support::raw_tensor("a", "BF16", {3}),
                           support::raw_tensor("b", "F32", {2}),
                           support::raw_tensor("c", "I64", {1})};
  support::FileOptions options;
  options.header_remainder = remainder;
  const std::string bytes = support::safetensors_bytes(tensors, options);
  const auto header = accept(bytes);
  REQUIRE(header.tensors.size() == 3);
  CHECK(header.tensors[0].range.offset % 8 == remainder);
  CHECK(header.file_byte_count == bytes.size());
  for (const bs::StoredTensor& tensor : header.tensors) {
    CHECK(bytes.substr(tensor.range.offset, tensor.range.byte_count) ==
          support::pattern_bytes(tensor.spec.name, tensor.range.byte_count));
  }
}

TEST_CASE("tensors come in the order of their bytes, whatever the order of the text") {
  const auto header = accept(raw_file("{" + entry_json("late", "U8", "[3]", "4", "7") + "," +
                                          entry_json("early", "F32", "[1]", "0", "4") + "}",
                                      "0123456"));
  REQUIRE(header.tensors.size() == 2);
  CHECK(header.tensors[0].spec == bs::TensorSpec{"early", bs::DType::f32, {1}});
  CHECK(header.tensors[1].spec == bs::TensorSpec{"late", bs::DType::u8, {3}});
  CHECK(header.tensors[1].range.byte_count == 3);
}

TEST_CASE("odd but legal headers are read") {
  CHECK(accept(raw_file("{}", "")).tensors.empty());
  CHECK(accept(raw_file("{\"__metadata__\":null}", "")).metadata.empty());
  CHECK(accept(raw_file("{\"__metadata__\":{}}      ", "")).metadata.empty());
  CHECK(accept(raw_file(R"({"__metadata__":{"format":"pt","a":""}})", "")).metadata ==
        std::map<std::string, std::string>{{"a", ""}, {"format", "pt"}});
  CHECK(accept(raw_file(R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"))
            .tensors[0]
            .spec.name.empty());
  CHECK(accept(raw_file(R"({"é/\u00e9":{"data_offsets":[0,1],"dtype":"U8","shape":[1]}})", "x"))
            .tensors[0]
            .spec.name == "é/é");
}

TEST_CASE("unknown keys of a tensor are skipped, as the reference implementation does") {
  const auto header = accept(raw_file(
      R"({"t":{"x":{"dtype":"F64","y":[[1,{}]]},"dtype":"U8","z":null,"w":[],"shape":[2],)"
      R"("v":-1.5,"data_offsets":[0,2],"u":"s"},"s":{"dtype":"U8","shape":[],"data_offsets":[2,3]}})",
      "abc"));
  REQUIRE(header.tensors.size() == 2);
  CHECK(header.tensors[0].spec == bs::TensorSpec{"t", bs::DType::u8, {2}});
}

TEST_CASE("b12 b13 scalars and tensors without elements are read") {
  const std::array tensors{
      support::raw_tensor("empty1", "F32", {0}), support::raw_tensor("empty2", "F32", {2, 0}),
      support::raw_tensor("scalar", "F32", {}),  support::raw_tensor("empty3", "I64", {0, 3}),
      support::raw_tensor("byte", "U8", {}),     support::raw_tensor("empty4", "BF16", {0})};
  const auto header = accept(support::safetensors_bytes(tensors));
  REQUIRE(header.tensors.size() == 6);
  std::uint64_t bytes = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.spec.name == "scalar") CHECK(tensor.range.byte_count == 4);
    if (tensor.spec.name == "scalar") CHECK(tensor.spec.shape.empty());
    if (tensor.spec.name == "byte") CHECK(tensor.range.byte_count == 1);
    bytes += tensor.range.byte_count;
  }
  CHECK(bytes == 5);
}

TEST_CASE("every carried dtype is read with its size") {
  for (int i = 0; i <= static_cast<int>(bs::DType::f64); ++i) {
    const auto dtype = static_cast<bs::DType>(i);
    const std::size_t size = bs::byte_count_of(dtype) * 3;
    const auto header =
        accept(one_tensor(bs::name_of(dtype), "[3]", "0", std::to_string(size), size));
    REQUIRE(header.tensors.size() == 1);
    CHECK(header.tensors[0].spec.dtype == dtype);
  }
}

TEST_CASE("b15 an unknown dtype is kept apart, its bytes still checked") {
  const auto header = accept(raw_file("{" + entry_json("odd", "F6_X", "[4]", "0", "3") + "," +
                                          entry_json("half", "F4", "[2]", "3", "4") + "," +
                                          entry_json("plain", "F8_E4M3", "[2]", "4", "6") + "}",
                                      "123456"));
  REQUIRE(header.unsupported.size() == 2);
  CHECK(header.unsupported[0].name == "odd");
  CHECK(header.unsupported[0].dtype == "F6_X");
  CHECK(header.tensors.size() == 1);
  CHECK_THAT(refusal(one_tensor("F6_X", "[4]", "0", "9", 3)), ContainsSubstring("'t'"));
}

TEST_CASE("b05 duplicate keys are refused by name") {
  const std::string two = "{" + entry_json("twin", "U8", "[1]", "0", "1") + "," +
                          entry_json("twin", "U8", "[1]", "1", "2") + "}";
  CHECK_THAT(refusal(raw_file(two, "ab")), ContainsSubstring("'twin' is listed twice"));
  CHECK_THAT(refusal(raw_file(
                 R"({"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "a")),
             ContainsSubstring("'t'") && ContainsSubstring("'dtype' is listed twice"));
  CHECK_THAT(refusal(raw_file(R"({"__metadata__":{"k":"1","k":"2"}})", "")),
             ContainsSubstring("'k' is listed twice"));
  CHECK_THAT(refusal(raw_file(R"({"__metadata__":{},"__metadata__":null})", "")),
             ContainsSubstring("__metadata__ is listed twice"));
}

TEST_CASE("b07 shapes and offsets that disagree are refused with their numbers") {
  CHECK_THAT(refusal(one_tensor("F32", "[1000,1000]", "0", "4", 4)),
             ContainsSubstring("'t'") && ContainsSubstring("[1000, 1000]") &&
                 ContainsSubstring("4000000 bytes") && ContainsSubstring("[0, 4]"));
  CHECK_THAT(refusal(one_tensor("U8", "[2]", "2", "0", 2)),
             ContainsSubstring("'t'") && ContainsSubstring("backwards"));
  CHECK_THAT(refusal(one_tensor("U8", "[9]", "0", "9", 4)),
             ContainsSubstring("'t'") && ContainsSubstring("5 are missing"));
  CHECK_THAT(refusal(one_tensor("U8", "[1]", "0", "18446744073709551615", 1)),
             ContainsSubstring("'t'"));
  CHECK_THAT(refusal(one_tensor("F64", "[4294967296,4294967296]", "0", "8", 8)),
             ContainsSubstring("more than 2^64"));
  CHECK_THAT(refusal(one_tensor("F64", "[2305843009213693952]", "0", "0", 0)),
             ContainsSubstring("more than 2^64"));
  for (const char* bad :
       {"-1", "1.0", "1e0", "true", "null", "\"1\"", "18446744073709551616", "[1]", "{}"}) {
    INFO(bad);
    CHECK_THAT(refusal(one_tensor("U8", "[1]", "0", bad, 1)), ContainsSubstring("'t'"));
    CHECK_THAT(refusal(one_tensor("U8", "[1]", bad, "1", 1)), ContainsSubstring("'t'"));
    CHECK_THAT(refusal(one_tensor("U8", "[" + std::string{bad} + "]", "0", "1", 1)),
               ContainsSubstring("'t'"));
  }
  for (const char* bad : {"1", "\"[1]\"", "null", "{}", "true", "-2"}) {
    INFO(bad);
    CHECK_THAT(refusal(one_tensor("U8", bad, "0", "1", 1)), ContainsSubstring("'t'"));
  }
}

TEST_CASE("fields that are missing or of the wrong kind are refused by tensor") {
  for (const char* entry :
       {R"({"dtype":"U8","shape":[1]})", R"({"dtype":"U8","data_offsets":[0,1]})",
        R"({"shape":[1],"data_offsets":[0,1]})", "{}", "1", "null", "[]", "\"U8\"", "true",
        R"({"dtype":7,"shape":[1],"data_offsets":[0,1]})",
        R"({"dtype":null,"shape":[1],"data_offsets":[0,1]})",
        R"({"dtype":["U8"],"shape":[1],"data_offsets":[0,1]})",
        R"({"dtype":"U8","shape":[1],"data_offsets":[0]})",
        R"({"dtype":"U8","shape":[1],"data_offsets":[0,1,1]})",
        R"({"dtype":"U8","shape":[1],"data_offsets":[]})",
        R"({"dtype":"U8","shape":[1],"data_offsets":"0,1"})"}) {
    INFO(entry);
    CHECK_THAT(refusal(raw_file("{\"t\":" + std::string{entry} + "}", "x")),
               ContainsSubstring("'t'"));
  }
  for (const char* metadata : {"1", "\"x\"", "[]", R"({"a":1})", R"({"a":{"b":"c"}})",
                               R"({"a":null})", R"({"a":["b"]})", "false"}) {
    INFO(metadata);
    CHECK_THAT(refusal(raw_file("{\"__metadata__\":" + std::string{metadata} + "}", "")),
               ContainsSubstring("__metadata__"));
  }
}

TEST_CASE("overlaps, holes and bytes without a tensor are refused") {
  const auto two = [](const char* begin, const char* end, std::size_t size) {
    return raw_file("{" + entry_json("a", "U8", "[4]", "0", "4") + "," +
                        entry_json("b", "U8", "[4]", begin, end) + "}",
                    std::string(size, 'x'));
  };
  CHECK(refusal(two("4", "8", 8)).empty());
  CHECK_THAT(refusal(two("2", "6", 6)),
             ContainsSubstring("'a'") && ContainsSubstring("'b'") && ContainsSubstring("overlap"));
  CHECK_THAT(refusal(two("0", "4", 4)), ContainsSubstring("overlap"));
  CHECK_THAT(refusal(two("5", "9", 9)),
             ContainsSubstring("'b'") && ContainsSubstring("belong to no tensor"));
  CHECK_THAT(refusal(one_tensor("U8", "[1]", "1", "2", 2)),
             ContainsSubstring("belong to no tensor"));
  CHECK_THAT(refusal(raw_file("{}", "x")), ContainsSubstring("1 bytes follow"));
}

TEST_CASE("b11 trailing bytes are refused, one decision for every reader") {
  const std::size_t extra = GENERATE(1, 511, 4096);
  const std::string good = good_file();
  REQUIRE(refusal(good).empty());
  CHECK_THAT(refusal(good + std::string(extra, '\0')),
             ContainsSubstring(std::to_string(extra) + " bytes follow the last tensor") &&
                 ContainsSubstring(std::to_string(good.size()) + " bytes, really " +
                                   std::to_string(good.size() + extra)));
}

TEST_CASE("b08 length prefixes that lie are refused before anything is allocated") {
  const std::string good = good_file();
  const std::uint64_t size = good.size();
  const std::int64_t before = support::peak_kibibytes();
  const auto prefixed = [&](std::uint64_t length) {
    return raw_file(std::string_view{good}.substr(8), "", length);
  };
  CHECK_THAT(refusal(prefixed(~std::uint64_t{0})), ContainsSubstring("18446744073709551615") &&
                                                       ContainsSubstring(std::to_string(size)) &&
                                                       ContainsSubstring("268435456"));
  CHECK_THAT(refusal(prefixed((std::uint64_t{256} << 20) + 1)), ContainsSubstring("268435457"));
  CHECK_THAT(refusal(prefixed(std::uint64_t{256} << 20)), ContainsSubstring("cut in its header"));
  CHECK_THAT(refusal(prefixed(size - 7)), ContainsSubstring("cut in its header") &&
                                              ContainsSubstring(std::to_string(size - 7)) &&
                                              ContainsSubstring(std::to_string(size)));
  CHECK_THAT(refusal(prefixed(0)), ContainsSubstring("claims 0 bytes"));
  CHECK_THAT(refusal(prefixed(1)), ContainsSubstring("claims 1 bytes"));
  CHECK_THAT(refusal(std::string(7, '\1')), ContainsSubstring("7 bytes"));
  CHECK_THAT(refusal(std::string(8, '\0')), ContainsSubstring("claims 0 bytes"));
  CHECK_THAT(refusal(""), ContainsSubstring("empty"));
  for (const char* header : {"[]", "12", "\"a\"", "null", " {}", "  "}) {
    INFO(header);
    CHECK_THAT(refusal(raw_file(header, "")), ContainsSubstring("does not begin with '{'"));
  }
  CHECK(support::peak_kibibytes() - before < 64 * 1024);
}

TEST_CASE("broken JSON is refused with the byte") {
  CHECK_THAT(refusal(raw_file("{\"a\":}", "")),
             ContainsSubstring("at byte 13") && ContainsSubstring("not valid JSON"));
  for (const char* header : {"{", "{}}", "{}{}", "{\"a\"}", "{\"a\":1,}", "{'a':1}", "{\"\xff\":1}",
                             "{\"a\":nan}", "{}\x01", "{/**/}", "{\"a\":1e999}"}) {
    INFO(header);
    CHECK_FALSE(refusal(raw_file(header, "")).empty());
  }
  CHECK_FALSE(refusal(raw_file(std::string_view{"{}\0\0", 4}, "")).empty());
}

TEST_CASE("nesting is bounded") {
  const std::string deep(100'000, '[');
  CHECK_THAT(refusal(raw_file("{\"t\":{\"x\":" + deep, "")), ContainsSubstring("nested deeper"));
  std::string objects = "{\"t\":{\"x\":";
  for (int i = 0; i < 50'000; ++i) objects += "{\"a\":";
  CHECK_THAT(refusal(raw_file(objects, "")), ContainsSubstring("nested deeper"));
  std::string ones = "[1";
  for (int i = 0; i < 100; ++i) ones += ",1";
  CHECK_THAT(refusal(one_tensor("U8", ones + "]", "0", "1", 1)),
             ContainsSubstring("64 dimensions"));
}

TEST_CASE("b16 files that are something else are told apart") {
  const std::string good = good_file();
  const std::string pointer = refusal(
      "version https://git-lfs.github.com/spec/v1\noid sha256:"
      "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n");
  CHECK_THAT(pointer, ContainsSubstring("Git LFS pointer") && ContainsSubstring("git lfs pull"));
  const std::string cut = refusal(good.substr(0, good.size() - 1));
  CHECK_THAT(cut, ContainsSubstring(std::to_string(good.size())) &&
                      ContainsSubstring(std::to_string(good.size() - 1)) &&
                      ContainsSubstring("1 are missing"));
  const std::string header_cut = refusal(good.substr(0, 40));
  CHECK_THAT(header_cut, ContainsSubstring("cut in its header"));
  const std::string page = refusal("<!DOCTYPE html>\n<html><body>404</body></html>");
  CHECK_THAT(page,
             ContainsSubstring("not a safetensors file") && ContainsSubstring("<!DOCTYPE html>"));
  CHECK_THAT(refusal("\xef\xbb\xbf<html>"), ContainsSubstring("not a safetensors file"));
  CHECK_THAT(refusal("oops"),
             ContainsSubstring("not a safetensors file") && ContainsSubstring("'oops'"));
}

TEST_CASE("a good file cut anywhere, or with any one byte changed, never crashes") {
  const std::string good = good_file();
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK_FALSE(refusal(good.substr(0, size)).empty());
  }
  const std::size_t header_end = good.find('}') + 60;
  for (std::size_t at = 0; at < std::min(header_end, good.size()); ++at) {
    for (const char value : {'\0', '"', '{', '}', '[', '9', '\xff', ','}) {
      std::string changed = good;
      changed[at] = value;
      static_cast<void>(refusal(changed));
    }
  }
}

TEST_CASE("b09 200000 tensors open, and a header above the cap names both sizes") {
  std::string header = "{";
  for (int i = 0; i < 200'000; ++i) {
    const std::string begin = std::to_string(i);
    if (i != 0) header += ",";
    header += entry_json("layer.tensor." + begin, "U8", "[1]", begin, std::to_string(i + 1));
  }
  const auto read = accept(raw_file(header + "}", std::string(200'000, 'x')));
  CHECK(read.tensors.size() == 200'000);
  const support::TempFolder folder;
  const std::uint64_t cap = std::uint64_t{256} << 20;
  support::write_text(folder / "big", raw_file("{", "", cap + 1));
  std::filesystem::resize_file(folder / "big", cap + 100);  // sparse
  CHECK_THROWS_WITH(bs::read_safetensors_header(folder / "big"),
                    ContainsSubstring("268435457") && ContainsSubstring("268435456"));
}

TEST_CASE("a file that cannot be opened is a storage error") {
  const support::TempFolder folder;
  CHECK_THROWS_AS(bs::read_safetensors_header(folder / "none"), bs::StorageError);
  CHECK_THROWS_AS(bs::read_safetensors_header(folder.path()), bs::StorageError);
}
