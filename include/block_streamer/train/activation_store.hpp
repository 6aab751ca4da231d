// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/pipeline/activation_options.hpp>
#include <block_streamer/train/activation_passage.hpp>
#include <block_streamer/train/host_places.hpp>
#include <block_streamer/train/saved_input.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Keeps the inputs of blocks between a forward and its backward: on the device, in
/// page-locked host memory, or in a file. What leaves the device goes through two passages on a
/// stream of its own, so at most two inputs that leave or return are on the device, beside what
/// flows. An input that cannot be moved byte by byte (elements that do not lie densely, a start
/// that is not aligned) is kept.
/// **Threads.** The visitor's; a SavedInput may be destroyed on any.
/// **Cost.** A host wait for the input before the last where it goes to a file, or where kernels
/// run on the visitor's thread and memory is not the host's; else none.
template <execution_backend Backend>
class ActivationStore {
 public:
  using Stream = typename Backend::Stream;

  /// @throws ContractViolation for options that do not fit; StorageError if no file can be made.
  ActivationStore(Backend backend, const ActivationOptions& options, bool computes_on_host)
      : backend_{std::move(backend)}, computes_on_host_{computes_on_host} {
    check(options);
    if (options.place == ActivationPlace::file)
      file_ = std::make_shared<FilePlaces>(options.folder);
    in_ram_ = options.place == ActivationPlace::ram && !backend_.host_addressable();
  }
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;
  ~ActivationStore() {
    abandon();
    try {
      quiesce();
    } catch (...) {  // a lost device copies nothing
    }
  }

  /// @brief Inputs wait where they are.
  [[nodiscard]] bool keeps_on_device() const noexcept { return !in_ram_ && !file_; }
  /// @brief Takes the input of a visit that computes on `compute`. @see settle
  /// @throws StorageError if an earlier one could not be written, or there is no memory for it.
  [[nodiscard]] SavedInput save(const at::Tensor& input, Stream& compute) {
    at::Tensor kept = input.detach();
    SavedInput saved;
    if (keeps_on_device() || !is_movable(kept)) {
      saved.version = static_cast<std::uint32_t>(kept._version());
      saved.share = ActivationMeter::Share{meter_, kept.nbytes()};
      saved.kept = std::move(kept);
      return saved;
    }
    saved.sizes = kept.sizes().vec();
    saved.strides = kept.strides().vec();
    saved.options = kept.options();
    saved.byte_count = kept.nbytes();
    Passage& passage = passages()[next_];
    next_ = (next_ + 1) % passage_count;
    passage.empty(compute);
    take_place(saved);
    passage.send(std::move(kept), ActivationMeter::Share{meter_, saved.byte_count}, saved, compute);
    meter_->change([&](ActivationUsage& usage) { usage.bytes_out += saved.byte_count; });
    return saved;
  }

  /// @brief Begins to bring an input back, while the one taken last is computed with.
  /// @pre it outlives the pass.
  void bring(const SavedInput& saved, Stream& compute) {
    if (!saved.kept.defined()) static_cast<void>(passage_of(saved, compute));
  }
  /// @brief The input, on the device in the order of `compute`; what take() gave before is let go
  /// of. @throws StorageError if it cannot be read.
  [[nodiscard]] at::Tensor take(const SavedInput& saved, Stream& compute) {
    if (current_ != nullptr) std::exchange(current_, nullptr)->empty(compute);
    if (saved.kept.defined()) return saved.kept;
    Passage& passage = passage_of(saved, compute);
    passage.arrive(compute);
    current_ = &passage;
    return passage.tensor();
  }

  /// @brief At the end of a pass: what left has left in the order of `compute`, and the caller may
  /// change it. @throws StorageError if something could not be written.
  void settle(Stream& compute) {
    current_ = nullptr;
    if (!moving_) return;
    for (Passage& passage : moving_->passages) passage.empty(compute);
  }
  /// @brief After a failure: nothing is on its way any more.
  void abandon() noexcept {
    current_ = nullptr;
    if (!moving_) return;
    for (Passage& passage : moving_->passages) passage.abandon();
  }

  [[nodiscard]] ActivationUsage usage() const {
    ActivationUsage usage = meter_->usage();
    if (places_) usage.host_bytes = places_->byte_count();
    if (file_) usage.file_bytes = file_->byte_count();
    if (!moving_) return usage;
    for (const Passage& passage : moving_->passages)
      usage.host_bytes += passage.staging_byte_count();
    return usage;
  }

 private:
  using Passage = ActivationPassage<Backend>;
  static constexpr std::size_t passage_count = 2;

  /// Made when something leaves the device for the first time.
  struct Moving {
    explicit Moving(Backend& backend, bool computes_on_host, std::shared_ptr<FilePlaces> file)
        : traffic{backend, computes_on_host, std::move(file), backend.make_stream()},
          quiet{backend.make_event()} {
      if (traffic.file) traffic.worker.emplace(1);
    }
    ActivationTraffic<Backend> traffic;
    typename Backend::Event quiet;
    std::array<Passage, passage_count> passages{Passage{traffic}, Passage{traffic}};
  };

  [[nodiscard]] std::array<Passage, passage_count>& passages() {
    if (!moving_) moving_ = std::make_unique<Moving>(backend_, computes_on_host_, file_);
    return moving_->passages;
  }
  void take_place(SavedInput& saved) {
    if (file_) {
      saved.begin = file_->take(saved.byte_count);
      return;
    }
    if (!places_) places_ = std::make_shared<HostPlaces<Backend>>(backend_);
    saved.memory = places_->take(saved.byte_count, [this] { quiesce(); });
  }
  /// Waits for all copies.
  void quiesce() {
    if (!moving_) return;
    backend_.record(moving_->quiet, moving_->traffic.copies);
    backend_.synchronize(moving_->quiet);
  }

  /// The passage that brings it, begun if none does. A guess that was wrong makes way.
  [[nodiscard]] Passage& passage_of(const SavedInput& saved, Stream& compute) {
    for (Passage& passage : passages()) {
      if (passage.brings(saved)) return passage;
    }
    Passage& passage = passage_to_use();
    passage.empty(compute);
    const c10::InferenceMode normal_mode{false};
    passage.bring(at::empty_strided(saved.sizes, saved.strides, saved.options),
                  ActivationMeter::Share{meter_, saved.byte_count}, saved, compute);
    meter_->change([&](ActivationUsage& usage) { usage.bytes_in += saved.byte_count; });
    return passage;
  }
  [[nodiscard]] Passage& passage_to_use() {
    auto& all = passages();
    const auto unused = std::ranges::find_if(all, &Passage::is_empty);
    if (unused != all.end()) return *unused;
    return &all[0] == current_ ? all[1] : all[0];
  }

  Backend backend_;
  bool computes_on_host_;
  bool in_ram_ = false;
  std::shared_ptr<ActivationMeter> meter_ = std::make_shared<ActivationMeter>();
  std::shared_ptr<FilePlaces> file_;             ///< null: not in a file
  std::shared_ptr<HostPlaces<Backend>> places_;  ///< of what is in host memory
  std::unique_ptr<Moving> moving_;
  std::size_t next_ = 0;
  Passage* current_ = nullptr;  ///< whose tensor is computed with
};

}  // namespace block_streamer::inline v1
