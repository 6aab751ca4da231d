// SPDX-License-Identifier: Apache-2.0
// Where a finetuning run writes: who may write there, and what must not be lost.
#pragma once

#include "common_options.hpp"
#include "jobs.hpp"

#include <block_streamer/os/folder_lock.hpp>

#include <filesystem>
#include <system_error>
#include <utility>

namespace block_streamer_cli {

/// The output folder while the program runs: nobody else works in it. Made if there is none, and
/// removed again if nothing comes into it.
class OutputClaim {
 public:
  explicit OutputClaim(std::filesystem::path folder)
      : folder_{std::move(folder)},
        existed_{is_there(folder_)},
        lock_{block_streamer::FolderLock::of(folder_)} {}
  OutputClaim(const OutputClaim&) = delete;
  OutputClaim& operator=(const OutputClaim&) = delete;
  ~OutputClaim() {
    std::error_code ignored;
    if (!existed_) std::filesystem::remove(folder_, ignored);  // only an empty one goes
  }

 private:
  static bool is_there(const std::filesystem::path& folder) {
    std::error_code ignored;
    return std::filesystem::exists(folder, ignored);
  }

  std::filesystem::path folder_;
  bool existed_;
  block_streamer::FolderLock lock_;
};

/// @brief Before anything changes: --output names a folder, and neither the model's nor that of the
/// adapter that the run begins with, which would be replaced so that the run could not be taken up
/// again. @throws block_streamer::Error
void expect_output_folder(const std::filesystem::path& model, const FinetuneOptions& options);

/// @brief What another kind of run left beside would be taken for a part of this one's result.
/// @throws block_streamer::Error
void expect_same_kind(const std::filesystem::path& model, const FinetuneOptions& options);

/// @brief Before anything is trained: the folder holds nothing that is not to be replaced.
/// @throws block_streamer::Error
void expect_free_or_resumable(const FinetuneOptions& options);

/// @brief With --resume and --dtype auto a run goes on in the type that it was begun in: what auto
/// chooses may differ from time to time. Says so.
/// @throws block_streamer::Error if the saved state is damaged, with the way out.
void take_up_dtype(CommonOptions& common, const FinetuneOptions& options);

}  // namespace block_streamer_cli
