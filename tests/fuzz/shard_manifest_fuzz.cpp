// SPDX-License-Identifier: Apache-2.0
// Any text as block_streamer.json: refused, or consistent in itself and written again the same.
#include <block_streamer/checkpoint/shard_manifest_reader.hpp>
#include <block_streamer/checkpoint/shard_manifest_writer.hpp>

#include "fuzz_input.hpp"

namespace bs = block_streamer;

namespace {

void check(const bs::ShardManifest& manifest, const bs::SummedRange& range) {
  std::uint64_t total = 0;
  for (const bs::FileRange& extent : range.extents) {
    fuzz::require(extent.file < manifest.files.size(), "an extent of no file");
    fuzz::require(
        extent.range.offset <= manifest.files[extent.file].byte_count &&
            extent.range.byte_count <= manifest.files[extent.file].byte_count - extent.range.offset,
        "an extent beyond its file");
    total += extent.range.byte_count;
  }
  fuzz::require(total == range.byte_count, "extents and size differ");
  fuzz::require(
      range.chunks.size() == (total + manifest.chunk_byte_count - 1) / manifest.chunk_byte_count,
      "chunks and size differ");
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::refuses_or_accepts([&] {
    const auto manifest = bs::parse_shard_manifest("m.json", fuzz::text_of(data, size));
    for (const bs::SummedRange& range : manifest.blocks) check(manifest, range);
    for (const bs::SummedRange& range : manifest.resident) check(manifest, range);
    const std::string written = bs::format_shard_manifest(manifest);
    const auto again = bs::parse_shard_manifest("m.json", written);
    fuzz::require(bs::format_shard_manifest(again) == written, "written and read, it differs");
  });
  return 0;
}
