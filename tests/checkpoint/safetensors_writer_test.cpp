// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/safetensors_writer.hpp>

#include <block_streamer/checkpoint/safetensors_header.hpp>

#include <support/safetensors_files.hpp>

#include <array>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {
std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span{text});
}
}  // namespace

TEST_CASE("b13 what is written is read back, scalars and empty tensors included") {
  const support::TempFolder folder;
  const std::string a = support::pattern_bytes("a", 24);
  const std::string b = support::pattern_bytes("b", 3);
  const std::string scalar = support::pattern_bytes("s", 4);
  const std::string none;
  const std::array tensors{bs::TensorBytes{{"b", bs::DType::u8, {3}}, bytes_of(b)},
                           bs::TensorBytes{{"a \"quoted\" é", bs::DType::f32, {2, 3}}, bytes_of(a)},
                           bs::TensorBytes{{"s", bs::DType::f32, {}}, bytes_of(scalar)},
                           bs::TensorBytes{{"e", bs::DType::bf16, {0, 7}}, bytes_of(none)}};
  bs::write_safetensors(folder / "f.safetensors", tensors, {{"format", "pt"}, {"a", "b\n"}});
  const auto header = bs::read_safetensors_header(folder / "f.safetensors");
  CHECK(header.metadata == std::map<std::string, std::string>{{"format", "pt"}, {"a", "b\n"}});
  REQUIRE(header.tensors.size() == 4);
  CHECK(header.tensors[0].range.offset % 8 == 0);
  const std::string file = support::read_text(folder / "f.safetensors");
  for (const bs::TensorBytes& tensor : tensors) {
    const auto at = std::find_if(header.tensors.begin(), header.tensors.end(),
                                 [&](const auto& t) { return t.spec == tensor.spec; });
    REQUIRE(at != header.tensors.end());
    CHECK(at->range.offset % bs::byte_count_of(tensor.spec.dtype) == 0);
    const std::string got = file.substr(at->range.offset, at->range.byte_count);
    CHECK(std::ranges::equal(bytes_of(got), tensor.bytes));
  }
}

TEST_CASE("the bytes depend on the tensors alone, not on their order") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("x", 8);
  std::array tensors{bs::TensorBytes{{"b", bs::DType::f32, {2}}, bytes_of(data)},
                     bs::TensorBytes{{"a", bs::DType::f32, {2}}, bytes_of(data)},
                     bs::TensorBytes{{"c", bs::DType::f64, {}}, bytes_of(data)}};
  bs::write_safetensors(folder / "1", tensors);
  std::swap(tensors[0], tensors[2]);
  bs::write_safetensors(folder / "2", tensors);
  CHECK(support::read_text(folder / "1") == support::read_text(folder / "2"));
  const std::string header = R"({"c":{"dtype":"F64","shape":[],"data_offsets":[0,8]},)"
                             R"("a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
                             R"("b":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}})";
  const std::string padding((8 - header.size() % 8) % 8, ' ');
  CHECK(support::read_text(folder / "1") ==
        support::raw_file(header + padding, data + data + data));
}

TEST_CASE("a file without tensors is legal") {
  const support::TempFolder folder;
  bs::write_safetensors(folder / "f", {});
  CHECK(bs::read_safetensors_header(folder / "f").tensors.empty());
}

TEST_CASE("callers' mistakes are refused before anything is written") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "old");
  const std::string data(8, 'x');
  const std::array twice{bs::TensorBytes{{"a", bs::DType::f64, {}}, bytes_of(data)},
                         bs::TensorBytes{{"a", bs::DType::f32, {2}}, bytes_of(data)}};
  CHECK_THROWS_AS(bs::write_safetensors(folder / "f", twice), bs::ContractViolation);
  const std::array wrong{bs::TensorBytes{{"a", bs::DType::f32, {3}}, bytes_of(data)}};
  CHECK_THROWS_AS(bs::write_safetensors(folder / "f", wrong), bs::ContractViolation);
  CHECK(support::read_text(folder / "f") == "old");
}
