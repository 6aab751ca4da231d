// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/checksums.hpp>
#include <block_streamer/checkpoint/copied_files.hpp>
#include <block_streamer/checkpoint/shard_folder.hpp>
#include <block_streamer/checkpoint/shard_journal.hpp>
#include <block_streamer/checkpoint/shard_manifest_writer.hpp>
#include <block_streamer/checkpoint/shard_plan.hpp>
#include <block_streamer/checkpoint/shard_writer.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/os/atomic_replace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace block_streamer::inline v1 {

/// What a conversion did.
struct ConversionReport {
  std::size_t files_written = 0;
  std::size_t files_kept = 0;    ///< complete from an earlier run, their sums were right
  std::uint64_t byte_count = 0;  ///< of all packed files
  ShardManifest manifest;
};

/// How a conversion behaves; ShardOptions say what it makes.
struct ConversionOptions {
  bool overwrite = false;  ///< a finished or foreign conversion in the folder may be replaced
  /// Called with bytes done and in all; what it throws ends the conversion, to be resumed.
  std::function<void(std::uint64_t, std::uint64_t)> progress{};
};

namespace detail {

class ShardConversion {
 public:
  ShardConversion(const Checkpoint& checkpoint, std::span<const PackedShard> shards,
                  std::filesystem::path folder, const ShardOptions& shard_options,
                  const ConversionOptions& options)
      : checkpoint_{checkpoint},
        shards_{shards},
        folder_{std::move(folder)},
        shard_options_{shard_options},
        options_{options},
        manifest_{ShardLayout::packed,
                  checksum_chunk_byte_count,
                  {},
                  {},
                  {},
                  {},
                  plan_identity(shards, checkpoint.files())} {
    for (const PackedShard& shard : shards) total_ += shard.byte_count;
  }

  [[nodiscard]] ConversionReport run() {
    if (is_done()) {
      report_.files_kept = shards_.size();
      report_.byte_count = total_;
      return std::move(report_);
    }
    const std::optional<ShardManifest> before = open_folder();
    remove_leftovers();
    check_space(before);
    for (const PackedShard& shard : shards_) {
      std::optional<WrittenShard> kept;
      if (before) kept = keep(*before, shard);
      ++(kept ? report_.files_kept : report_.files_written);
      enter(kept ? std::move(*kept) : write(shard));
      write_shard_journal(folder_, manifest_);
    }
    finish();
    report_.byte_count = total_;
    report_.manifest = std::move(manifest_);
    return std::move(report_);
  }

 private:
  /// True if the same conversion ended before; it is not looked at again.
  [[nodiscard]] bool is_done() {
    std::optional<ShardManifest> manifest = packed_manifest();
    if (!manifest || manifest->plan != manifest_.plan || options_.overwrite) return false;
    remove(folder_ / journal_file_name);  // a run that was killed right before its end left it
    report_.manifest = std::move(*manifest);
    return true;
  }
  /// Makes sure that the folder is ours to write into, and marks it as unfinished.
  /// @returns what an earlier run of the same conversion left.
  [[nodiscard]] std::optional<ShardManifest> open_folder() {
    std::error_code error;
    std::filesystem::create_directories(folder_, error);
    if (error) throw StorageError{folder_.string(), "cannot make the folder", error};
    if (std::filesystem::equivalent(folder_, checkpoint_.folder(), error)) {
      throw Error{folder_.string() + ": a model cannot be converted into its own folder"};
    }
    std::optional<ShardManifest> journal = find_shard_journal(folder_);
    if (journal && journal->plan != manifest_.plan) journal.reset();
    // First what no option allows: a refusal that names --overwrite is only made where it helps.
    const std::vector<std::filesystem::path> replaced = replaceable_files();
    if (!journal && !options_.overwrite) refuse_what_is_there();
    if (!journal) write_shard_journal(folder_, manifest_);
    remove(folder_ / manifest_file_name);  // from here on the folder is unfinished
    remove(folder_ / index_file_name);
    if (!journal) {
      for (const std::filesystem::path& path : replaced) remove(path);
    }
    return journal;
  }
  void refuse_what_is_there() const {
    const auto refuse = [&](const std::string& what) {
      throw Error{folder_.string() + ": " + what};
    };
    if (is_listed(folder_ / manifest_file_name)) {
      refuse("another converted model lies here already; --overwrite replaces it");
    }
    if (is_listed(folder_ / journal_file_name)) {
      refuse(
          "an unfinished conversion of another model or with other options lies here; "
          "--overwrite replaces it");
    }
    // A run that was killed before it had a journal leaves a part of one.
    std::error_code error;
    for (std::filesystem::directory_iterator at{folder_, error}, end; !error && at != end;
         at.increment(error)) {
      if (!is_unfinished_part(at->path())) {
        refuse("the folder is not empty; --overwrite writes into it all the same");
      }
    }
    if (error) throw StorageError{folder_.string(), "cannot list the folder", error};
  }
  /// Files that a conversion wrote. @throws Error if there are weights that came from elsewhere.
  [[nodiscard]] std::vector<std::filesystem::path> replaceable_files() const {
    std::vector<std::filesystem::path> files;
    const bool begun = is_listed(folder_ / journal_file_name);
    const std::optional<ShardManifest> manifest = packed_manifest();
    for (const std::filesystem::path& path : list_safetensors(folder_)) {
      const std::string name = path.filename().string();
      const auto is_it = [&](const SummedFile& file) { return file.name == name; };
      const bool listed =
          manifest && std::any_of(manifest->files.begin(), manifest->files.end(), is_it);
      // A killed run's last file may not be in its journal yet.
      if (!listed && !(begun && name.starts_with("model-"))) {
        throw Error{path.string() +
                    ": there are other weights in this folder; choose another folder"};
      }
      files.push_back(path);
    }
    if (manifest) {
      for (const SummedFile& file : manifest->copied) files.push_back(folder_ / file.name);
    }
    if (!manifest && !begun) refuse_to_copy_over();
    return files;
  }
  /// Nothing here is of a conversion: what the model's files would replace is somebody's.
  void refuse_to_copy_over() const {
    for (const std::filesystem::path& path : model_files(checkpoint_.folder())) {
      const std::filesystem::path there = folder_ / path.filename();
      if (!is_listed(there)) continue;
      throw Error{
          there.string() +
          ": no conversion wrote this file, and it would be replaced; choose another folder"};
    }
  }
  /// The manifest of an earlier conversion; nullopt if there is none, or one that is not ours.
  [[nodiscard]] std::optional<ShardManifest> packed_manifest() const {
    try {
      std::optional<ShardManifest> manifest = find_shard_manifest(folder_);
      if (manifest && manifest->layout == ShardLayout::packed) return manifest;
    } catch (const Error&) {  // damaged, or of a newer version
    }
    return std::nullopt;
  }
  void remove(const std::filesystem::path& path) const {
    std::error_code error;
    std::filesystem::remove(path, error);
    if (error) throw StorageError{path.string(), "cannot remove the file", error};
  }
  /// What a killed run had not moved into place yet.
  void remove_leftovers() const {
    std::vector<std::filesystem::path> leftovers;
    std::error_code error;
    for (std::filesystem::directory_iterator at{folder_, error}, end; !error && at != end;
         at.increment(error)) {
      if (is_unfinished_part(at->path())) leftovers.push_back(at->path());
    }
    if (error) throw StorageError{folder_.string(), "cannot list the folder", error};
    for (const std::filesystem::path& path : leftovers) remove(path);
  }
  void check_space(const std::optional<ShardManifest>& before) const {
    std::uint64_t there = 0;
    if (before) {
      for (const SummedFile& file : before->files) there += file.byte_count;
    }
    std::error_code error;
    const auto space = std::filesystem::space(folder_, error);
    if (error || total_ - std::min(total_, there) <= space.available) return;
    throw StorageError{folder_.string(), "the converted model takes " + std::to_string(total_) +
                                             " bytes, " + std::to_string(space.available) +
                                             " are free on this disk"};
  }

  /// A file of an earlier run whose sums are right; nullopt if it has to be written.
  [[nodiscard]] std::optional<WrittenShard> keep(const ShardManifest& old,
                                                 const PackedShard& shard) {
    const auto at = std::find_if(old.files.begin(), old.files.end(), [&](const SummedFile& file) {
      return file.name == shard.file_name;
    });
    if (at == old.files.end() || !at->crc32c || at->byte_count != shard.byte_count) {
      return std::nullopt;
    }
    const std::uint64_t done = done_;
    try {
      verify_file(folder_, *at, counted(shard));
    } catch (const ChecksumError&) {
      done_ = done;
      return std::nullopt;
    } catch (const StorageError&) {  // not there, or not readable
      done_ = done;
      return std::nullopt;
    }
    WrittenShard written{*at, {}, {}};
    const auto take = [&](const std::vector<SummedRange>& from, std::vector<SummedRange>& to,
                          PackedGroup::Kind kind) {
      for (const PackedGroup& group : shard.groups) {
        if (group.kind != kind) continue;
        const auto range = std::find_if(from.begin(), from.end(),
                                        [&](const SummedRange& r) { return r.name == group.name; });
        if (range == from.end()) return false;
        to.push_back(*range);
        for (FileRange& extent : to.back().extents) extent.file = 0;
      }
      return true;
    };
    const bool all = take(old.blocks, written.blocks, PackedGroup::Kind::block) &&
                     take(old.resident, written.resident, PackedGroup::Kind::resident);
    return all ? std::optional{std::move(written)} : std::nullopt;
  }
  [[nodiscard]] WrittenShard write(const PackedShard& shard) {
    const std::uint64_t done = done_;
    WrittenShard written = write_shard(folder_, shard, checkpoint_.files(), counted(shard));
    done_ = done + shard.byte_count;
    return written;
  }
  /// Reports progress; a converted file is read and written in different sizes.
  [[nodiscard]] ByteProgress counted(const PackedShard& shard) {
    return [this, end = done_ + shard.byte_count](std::uint64_t byte_count) {
      done_ = std::min(done_ + byte_count, end);
      if (options_.progress) options_.progress(done_, total_);
    };
  }

  void enter(WrittenShard written) {
    const auto file = static_cast<std::uint32_t>(manifest_.files.size());
    const auto append = [&](std::vector<SummedRange>& from, std::vector<SummedRange>& to) {
      for (SummedRange& range : from) {
        for (FileRange& extent : range.extents) extent.file = file;
        to.push_back(std::move(range));
      }
    };
    append(written.blocks, manifest_.blocks);
    append(written.resident, manifest_.resident);
    manifest_.files.push_back(std::move(written.file));
  }

  /// The manifest last: with it the folder is complete.
  void finish() {
    manifest_.copied = copy_model_files(checkpoint_.folder(), folder_, shard_options_.dtype);
    std::string map;
    for (const PackedShard& shard : shards_) {
      for (const PackedGroup& group : shard.groups) {
        for (const PackedTensor& tensor : group.tensors) {
          map += (map.empty() ? "" : ",\n") + nlohmann::json(tensor.name).dump() + ":" +
                 nlohmann::json(shard.file_name).dump();
        }
      }
    }
    atomic_replace(folder_ / index_file_name,
                   std::string_view{"{\"metadata\":{\"total_size\":" + std::to_string(total_) +
                                    "},\n\"weight_map\":{\n" + map + "}}\n"});
    atomic_replace(folder_ / manifest_file_name,
                   std::string_view{format_shard_manifest(manifest_)});
    remove(folder_ / journal_file_name);
  }

  const Checkpoint& checkpoint_;
  std::span<const PackedShard> shards_;
  std::filesystem::path folder_;
  const ShardOptions& shard_options_;
  const ConversionOptions& options_;
  ShardManifest manifest_;  ///< of what is complete
  ConversionReport report_;
  std::uint64_t total_ = 0;
  std::uint64_t done_ = 0;
};

}  // namespace detail

/// @brief Packs a checkpoint into `folder`: files of weights that any tier reads without over-read,
/// their checksums, and the model's other files, so that the folder is a model folder like the one
/// it came from. docs/packed_shards.md has the format.
/// May be killed at any moment: run again with the same arguments it goes on at the first file that
/// is not complete, after checking the sums of those that are. The manifest appears last; before,
/// the folder is refused as unfinished. Failures leave it so. The same call after the end does
/// nothing.
/// @param blocks, resident  as plan_shards().
/// @throws BindingError, UnsupportedError as plan_shards(); StorageError if reading or writing
/// fails or the disk has no room; Error if the folder holds something else.
/// **Threads.** One conversion into a folder at a time. **Cost.** Reads and writes every tensor
/// once; 20 MiB of memory and the manifest. A resumed run reads complete files once.
inline ConversionReport convert_to_shards(const Checkpoint& checkpoint,
                                          std::span<const BlockTensors> blocks,
                                          std::span<const std::string> resident,
                                          const std::filesystem::path& folder,
                                          const ShardOptions& shard_options = {},
                                          const ConversionOptions& options = {}) {
  const std::vector<PackedShard> shards = plan_shards(checkpoint, blocks, resident, shard_options);
  return detail::ShardConversion{checkpoint, shards, folder, shard_options, options}.run();
}

}  // namespace block_streamer::inline v1
