// SPDX-License-Identifier: Apache-2.0
// --verify-reads: stored weights are compared with their checksums before they are used.
#pragma once

#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/checksums.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/decorators/verified_storage.hpp>

#include <string>
#include <utility>

namespace block_streamer_cli {

/// @brief The model's checksums; what stays resident is compared with them at once.
/// @throws Error if there are none; ChecksumError if a tensor differs.
inline const block_streamer::ShardManifest& checked_manifest(
    const block_streamer::Checkpoint& checkpoint) {
  const block_streamer::ShardManifest* manifest = checkpoint.manifest();
  if (manifest == nullptr) {
    throw block_streamer::Error{checkpoint.folder().string() +
                                ": --verify-reads needs checksums; 'block-streamer checksum "
                                "--model DIR' makes them"};
  }
  for (const block_streamer::SummedRange& tensor : manifest->resident) {
    block_streamer::verify_range(checkpoint.folder(), *manifest, tensor);
  }
  return *manifest;
}

/// @brief Compares all of a model's weights with their checksums, on the disk.
/// @throws as checked_manifest().
inline void verify_files(const block_streamer::models::DecoderModel& model) {
  const block_streamer::Checkpoint& checkpoint = model.checkpoint();
  const block_streamer::ShardManifest& manifest = checked_manifest(checkpoint);
  const std::string path = (checkpoint.folder() / block_streamer::manifest_file_name).string();
  // Made for the whole model all the same: sums of other blocks are refused.
  static_cast<void>(block_streamer::make_image_sums(model.block_map(), manifest, path));
  for (const block_streamer::SummedRange& block : manifest.blocks) {
    block_streamer::verify_range(checkpoint.folder(), manifest, block);
  }
}

/// @brief A tier that compares every read; one that is in memory already is compared on the disk,
/// once.
[[nodiscard]] inline block_streamer::AnyStorage verified_storage(
    block_streamer::AnyStorage storage, const block_streamer::models::DecoderModel& model) {
  if (storage.addressable() || storage.block_count() == 0) {
    verify_files(model);
    return storage;
  }
  const block_streamer::Checkpoint& checkpoint = model.checkpoint();
  const block_streamer::ShardManifest& manifest = checked_manifest(checkpoint);
  const std::string path = (checkpoint.folder() / block_streamer::manifest_file_name).string();
  const auto granularity = storage.image(block_streamer::BlockId{0}).read_granularity;
  auto sums = block_streamer::make_image_sums(model.block_map(granularity), manifest, path);
  return block_streamer::VerifiedStorage{std::move(storage), std::move(sums)};
}

}  // namespace block_streamer_cli
