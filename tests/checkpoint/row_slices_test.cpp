// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/row_slices.hpp>

#include <block_streamer/checkpoint/block_image_check.hpp>

#include <support/safetensors_files.hpp>

#include <string>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

/// The slices follow one another from the first row to the last.
void check_cover(const std::vector<bs::RowRange>& slices, std::uint64_t rows) {
  std::uint64_t next = 0;
  bool in_order = true;
  for (const bs::RowRange& slice : slices) {
    in_order = in_order && slice.begin == next && slice.count > 0;
    next += slice.count;
  }
  CHECK(in_order);
  CHECK(next == rows);
}

}  // namespace

TEST_CASE("slices cover a matrix evenly, and all begin aligned in types of two bytes and more") {
  for (const std::uint64_t rows : {1U, 2U, 89U, 127U, 128U, 129U, 4099U, 151936U, 201088U}) {
    for (const std::uint64_t columns : {1U, 36U, 40U, 63U, 576U, 2880U, 4096U}) {
      for (const std::uint64_t most : {1U, 5000U, 1U << 20, 1U << 25}) {
        INFO(rows << " x " << columns << ", at most " << most);
        const auto slices = bs::slice_rows(rows, columns, most);
        check_cover(slices, rows);
        bool aligned = true, even = true;
        for (const bs::RowRange& slice : slices) {
          aligned = aligned && slice.begin * columns * 2 % 256 == 0;
          even = even && (slice.count == slices.front().count || &slice == &slices.back());
        }
        CHECK(aligned);
        CHECK(even);
        // Aligned slices may need more than so few elements.
        if (most >= 128 * columns) CHECK(slices.front().count * columns <= most);
      }
    }
  }
}

TEST_CASE("a matrix within the limit is one slice, a larger one is as few as there can be") {
  CHECK(bs::slice_rows(49152, 576, 1U << 25) == std::vector<bs::RowRange>{{0, 49152}});
  const auto slices = bs::slice_rows(151936, 4096, 1U << 25);
  CHECK(slices.size() == 19);
  CHECK(slices.front().count == 8064);
  CHECK(slices.back().count == 151936 - 18 * 8064);
  CHECK_THROWS_AS(bs::slice_rows(0, 4, 8), bs::ContractViolation);
  CHECK_THROWS_AS(bs::slice_rows(4, 4, 0), bs::ContractViolation);
}

TEST_CASE("the images of slices hold the matrix's bytes, each once, at any read granularity") {
  const support::TempFolder folder;
  // The tensor before it has an odd size: the matrix begins at no even address.
  support::write_safetensors_file(folder / "model.safetensors",
                                  std::vector{support::raw_tensor("first", "U8", {7}),
                                              support::raw_tensor("table", "BF16", {50, 12})});
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const std::string file = support::read_text(folder / "model.safetensors");
  const std::string expected = support::pattern_bytes("table", 1200);
  const std::vector<bs::RowRange> slices{{0, 20}, {20, 20}, {40, 10}};
  for (const std::uint32_t granularity : {1U, 16U, 512U}) {
    INFO("granularity " << granularity);
    const bs::BlockMap map = bs::make_row_slice_map(checkpoint, "table", slices, granularity);
    std::string together;
    for (std::size_t i = 0; i < slices.size(); ++i) {
      const bs::BlockSource& source = map.blocks()[i];
      REQUIRE_FALSE(bs::validate(source.image));
      REQUIRE(source.extents.size() == 1);
      REQUIRE(source.image.segments.size() == 1);
      const bs::TensorPlacement& tensor = source.image.layout.tensors.at(0);
      CHECK(tensor.spec.name == bs::slice_name("table", slices[i]));
      CHECK(tensor.spec.shape == bs::Shape{slices[i].count, 12});
      CHECK(tensor.spec.dtype == bs::DType::bf16);
      CHECK(source.image.layout.slot_byte_count[0] == slices[i].count * 24);
      const bs::Segment& segment = source.image.segments[0];
      const std::uint64_t begin = source.extents[0].file_offset + segment.image_offset;
      together += file.substr(begin, segment.byte_count);
      if (granularity == 1) CHECK(source.image.byte_count == slices[i].count * 24);
    }
    CHECK(together == expected);
  }
}

TEST_CASE("a place in a slice is told with the rows and the tensor") {
  const support::TempFolder folder;
  support::write_safetensors_file(folder / "model.safetensors",
                                  std::vector{support::raw_tensor("table", "F32", {9, 4})});
  const auto checkpoint = bs::Checkpoint::open(folder.path());
  const std::vector<bs::RowRange> slices{{0, 5}, {5, 4}};
  const bs::BlockMap map = bs::make_row_slice_map(checkpoint, "table", slices);
  const std::string place = map.locate(bs::BlockId{1}, 3);
  CAPTURE(place);
  CHECK(place.find("tensor table[5:9]") != std::string::npos);
  const std::uint64_t offset = checkpoint.at("table").range.offset + 5 * 16 + 3;
  CHECK(place.find("offset " + std::to_string(offset)) != std::string::npos);
  const std::vector<bs::RowRange> beyond{{5, 5}};
  CHECK_THROWS_AS(bs::make_row_slice_map(checkpoint, "table", beyond), bs::ContractViolation);
  CHECK_THROWS_AS(bs::make_row_slice_map(checkpoint, "absent", slices), bs::BindingError);
}
