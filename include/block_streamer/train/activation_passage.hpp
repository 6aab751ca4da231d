// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/host_edges.hpp>
#include <block_streamer/pipeline/copy_out.hpp>
#include <block_streamer/train/activation_usage.hpp>
#include <block_streamer/train/background_task.hpp>
#include <block_streamer/train/file_places.hpp>
#include <block_streamer/train/saved_input.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>

namespace block_streamer::inline v1 {

/// What passages share.
template <execution_backend Backend>
struct ActivationTraffic {
  Backend backend;
  bool computes_on_host;
  std::shared_ptr<FilePlaces> file;  ///< null: bytes go to host memory
  typename Backend::Stream copies;
  std::optional<WorkerThreads> worker{};  ///< that works on the file
};

/// @brief One input on its way from the device or back to it. The tensor on the device is held
/// until its copy out is done in the order of the compute stream, for the memory may be used again
/// in that order then; what a copy in writes to was free in the order of the compute stream when it
/// was taken. Where kernels run on the visitor's thread, the host waits instead.
/// **Threads.** The visitor's; the traffic's worker has it between the start and the end of a task.
template <execution_backend Backend>
class ActivationPassage {
 public:
  using Stream = typename Backend::Stream;
  using Traffic = ActivationTraffic<Backend>;

  explicit ActivationPassage(Traffic& traffic)
      : traffic_{traffic},
        ready_{traffic.backend.make_event()},
        moved_{traffic.backend.make_event()} {}
  ActivationPassage(const ActivationPassage&) = delete;
  ActivationPassage& operator=(const ActivationPassage&) = delete;
  ~ActivationPassage() { abandon(); }

  [[nodiscard]] bool is_empty() const noexcept { return !tensor_.defined(); }
  /// @brief True if this input is on its way back, or there.
  [[nodiscard]] bool brings(const SavedInput& saved) const noexcept { return brings_ == &saved; }
  /// @brief What came back. @pre arrived.
  [[nodiscard]] const at::Tensor& tensor() const noexcept { return tensor_; }

  /// @brief Sends `input` to the place of `saved`. @pre is_empty().
  void send(at::Tensor input, ActivationMeter::Share share, const SavedInput& saved,
            Stream& compute) {
    hold(std::move(input), std::move(share));
    const std::span<std::byte> bytes = dense_bytes(tensor_);
    if (!traffic_.file) return copy_out({saved.memory.get(), bytes.size()}, compute);
    const std::uint64_t begin = *saved.begin;
    if (traffic_.backend.host_addressable()) {
      return start([this, begin, bytes] { traffic_.file->write(begin, bytes); });
    }
    const std::span<std::byte> staged = staging(bytes.size());
    copy_out(staged, compute);
    start([this, begin, staged] {
      traffic_.backend.synchronize(moved_);
      traffic_.backend.touch_on_host(staged, Access::read);
      traffic_.file->write(begin, staged);
    });
  }

  /// @brief Begins to bring `saved` back into `target`. @pre is_empty(); `target` was taken in the
  /// order of `compute`.
  void bring(at::Tensor target, ActivationMeter::Share share, const SavedInput& saved,
             Stream& compute) {
    hold(std::move(target), std::move(share));
    brings_ = &saved;
    const std::span<std::byte> bytes = dense_bytes(tensor_);
    touch(Access::write, compute);
    if (traffic_.file && traffic_.backend.host_addressable()) {
      return start([this, begin = *saved.begin, bytes] { traffic_.file->read(begin, bytes); });
    }
    if (!traffic_.file) {
      traffic_.backend.record(ready_, compute);
      return copy_in(bytes, {saved.memory.get(), bytes.size()});
    }
    const std::span<std::byte> staged = staging(bytes.size());
    traffic_.backend.record(ready_, compute);
    start([this, begin = *saved.begin, bytes, staged] {
      traffic_.backend.touch_on_host(staged, Access::write);
      traffic_.file->read(begin, staged);
      copy_in(bytes, staged);
    });
  }

  /// @brief What comes back may be computed with on `compute` after this.
  /// @throws what went wrong on the way; it is empty then.
  void arrive(Stream& compute) {
    end_task();
    order_after_move(compute);
    touch(Access::read, compute);
  }
  /// @brief The tensor is let go of: its memory may be used again in the order of `compute`.
  /// @throws what went wrong on the way; it is empty all the same.
  void empty(Stream& compute) {
    if (is_empty()) return;
    end_task();
    order_after_move(compute);
    touch(Access::write, compute);
    drop();
  }
  /// @brief The same on the host, after a failure: nothing is on its way any more.
  void abandon() noexcept {
    static_cast<void>(task_.wait());
    accept_host_edge(traffic_.backend, this);
    try {
      if (std::exchange(moving_, false)) traffic_.backend.synchronize(moved_);
    } catch (...) {  // a lost device copies nothing
    }
    drop();
  }
  [[nodiscard]] std::uint64_t staging_byte_count() const noexcept { return staging_size_; }

 private:
  void hold(at::Tensor tensor, ActivationMeter::Share share) {
    tensor_ = std::move(tensor);
    share_ = std::move(share);
  }
  void drop() noexcept {
    tensor_ = at::Tensor{};
    share_ = {};
    brings_ = nullptr;
  }
  void copy_out(std::span<std::byte> to, Stream& compute) {
    Backend& backend = traffic_.backend;
    backend.record(ready_, compute);
    backend.wait(traffic_.copies, ready_);
    backend.copy_async(to, dense_bytes(tensor_), CopyDirection::device_to_host, traffic_.copies);
    record_move();
  }
  void copy_in(std::span<std::byte> to, std::span<const std::byte> from) {
    Backend& backend = traffic_.backend;
    backend.wait(traffic_.copies, ready_);
    backend.copy_async(to, from, CopyDirection::host_to_device, traffic_.copies);
    record_move();
  }
  void record_move() {
    traffic_.backend.record(moved_, traffic_.copies);
    moving_ = recorded_ = true;
  }
  void order_after_move(Stream& compute) {
    if (!std::exchange(moving_, false)) return;
    if (traffic_.computes_on_host) {
      traffic_.backend.synchronize(moved_);
    } else {
      traffic_.backend.wait(compute, moved_);
    }
  }
  /// Page-locked memory of its own that no copy uses.
  [[nodiscard]] std::span<std::byte> staging(std::size_t byte_count) {
    if (recorded_) traffic_.backend.synchronize(moved_);
    if (staging_size_ < byte_count) {
      staging_.reset();
      staging_size_ = 0;
      staging_.emplace(traffic_.backend, byte_count);
      staging_size_ = byte_count;
    }
    return staging_->bytes().first(byte_count);
  }

  template <class Work>
  void start(Work work) {
    publish_host_edge(traffic_.backend, this);
    task_.start(*traffic_.worker, [this, work = std::move(work)] {
      accept_host_edge(traffic_.backend, this);
      try {
        work();
      } catch (...) {
        publish_host_edge(traffic_.backend, this);
        throw;
      }
      publish_host_edge(traffic_.backend, this);
    });
  }
  void end_task() {
    const std::exception_ptr error = task_.wait();
    accept_host_edge(traffic_.backend, this);
    if (!error) return;
    abandon();
    std::rethrow_exception(error);
  }
  void touch(Access access, Stream& compute) noexcept {
    const std::span<const std::byte> bytes = dense_bytes(tensor_);
    traffic_.computes_on_host ? traffic_.backend.touch_on_host(bytes, access)
                              : traffic_.backend.touch_on_stream(bytes, access, compute);
  }

  Traffic& traffic_;
  typename Backend::Event ready_;  ///< on compute: the bytes are there, or the memory is free
  typename Backend::Event moved_;  ///< on the copy stream
  at::Tensor tensor_;
  ActivationMeter::Share share_;
  const SavedInput* brings_ = nullptr;
  bool moving_ = false;    ///< nobody was ordered after moved_ yet
  bool recorded_ = false;  ///< moved_ was, ever
  std::optional<LockedMemory<Backend>> staging_;
  std::uint64_t staging_size_ = 0;
  BackgroundTask task_;
};

}  // namespace block_streamer::inline v1
