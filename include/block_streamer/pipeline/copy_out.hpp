// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/config.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/os/huge_pages.hpp>
#include <block_streamer/pipeline/span_trace.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief Host memory of the wanted size, page-locked where the system allows it: where it does
/// not, copies work all the same, slower.
template <execution_backend Backend>
class LockedMemory {
 public:
  /// @throws StorageError or DeviceError if the memory cannot be had.
  LockedMemory(Backend backend, std::uint64_t byte_count)
      : backend_{std::move(backend)}, pages_{static_cast<std::size_t>(byte_count)} {
    if (byte_count > 0) registration_ = backend_.register_host(pages_.bytes());
  }
  [[nodiscard]] std::span<std::byte> bytes() noexcept { return pages_.bytes(); }

 private:
  Backend backend_;  // a registration is valid with a copy of the backend that made it
  HugePages pages_;
  std::optional<typename Backend::HostRegistration> registration_;  // released before the pages
};

/// @brief The way out of the device for results that come one after another: two places in device
/// memory, filled in turn by the compute stream and emptied by a copy stream of their own into host
/// memory, so that one is copied while the next is computed. Beside each lies a place of the same
/// size in page-locked memory, for what has no better target.
/// **Threads.** The visitor's.
/// **Lifetime.** Whoever destroys it has waited: @see wait_all.
template <execution_backend Backend>
class CopyOut {
 public:
  using Stream = typename Backend::Stream;
  struct Piece {
    std::span<const std::byte> from;  ///< in the device place
    std::span<std::byte> to;          ///< page-locked host memory
  };

  static constexpr std::uint32_t place_count = 2;

  /// @param byte_count  of one place. @param computes_on_host  kernels run on the visitor's thread.
  /// @throws DeviceError, StorageError if the memory cannot be had.
  /// @param trace  is told of the copies.
  CopyOut(Backend& backend, std::uint64_t byte_count, bool computes_on_host,
          TraceSinkRef trace = {})
      : backend_{backend},
        stride_{round_up(byte_count, tensor_alignment)},
        computes_on_host_{computes_on_host},
        device_{backend.allocate_device(static_cast<std::size_t>(place_count * stride_))},
        host_{backend, place_count * stride_},
        stream_{backend.make_stream()},
        filled_{backend.make_event(), backend.make_event()},
        emptied_{backend.make_event(), backend.make_event()},
        trace_{backend_, trace} {}
  CopyOut(const CopyOut&) = delete;  // the trace points to its backend
  CopyOut& operator=(const CopyOut&) = delete;

  [[nodiscard]] std::uint64_t device_byte_count() const noexcept { return place_count * stride_; }
  [[nodiscard]] std::uint64_t place_byte_count() const noexcept { return stride_; }
  [[nodiscard]] std::span<std::byte> device_place(std::uint32_t place) const noexcept {
    return backend_.bytes(device_).subspan(place * stride_, stride_);
  }
  [[nodiscard]] std::span<std::byte> host_place(std::uint32_t place) noexcept {
    return host_.bytes().subspan(place * stride_, stride_);
  }

  /// @brief The place may be filled on `compute` after this: its last content was copied out, in
  /// the order of that stream, or, where kernels run on the visitor's thread, by now.
  void begin(std::uint32_t place, Stream& compute) {
    if (sent_[place]) {
      if (computes_on_host_) {
        backend_.synchronize(emptied_[place]);
      } else {
        backend_.wait(compute, emptied_[place]);
      }
    }
    touch(device_place(place), Access::write, compute);
  }
  /// @brief Copies what was filled in on `compute`. Host targets stay untouched until wait().
  /// @param part  what it belongs to, for the trace.
  void send(std::uint32_t place, std::span<const Piece> pieces, Stream& compute, PartId part = {}) {
    backend_.record(filled_[place], compute);
    backend_.wait(stream_, filled_[place]);
    auto begin = trace_.begin_on(stream_);
    std::uint64_t byte_count = 0;
    for (const Piece& piece : pieces) {
      backend_.copy_async(piece.to, piece.from, CopyDirection::device_to_host, stream_);
      byte_count += piece.to.size();
    }
    trace_.end_on("copy", Lane::copy_out, part, std::move(begin), byte_count, stream_);
    backend_.record(emptied_[place], stream_);
    sent_[place] = true;
  }
  /// @brief Waits on the host until the place's content has arrived.
  void wait(std::uint32_t place) {
    if (sent_[place]) backend_.synchronize(emptied_[place]);
  }
  void wait_all() {
    for (std::uint32_t place = 0; place < place_count; ++place) wait(place);
    trace_.drain();
  }

 private:
  void touch(std::span<const std::byte> bytes, Access access, Stream& compute) noexcept {
    computes_on_host_ ? backend_.touch_on_host(bytes, access)
                      : backend_.touch_on_stream(bytes, access, compute);
  }

  Backend backend_;
  std::uint64_t stride_;
  bool computes_on_host_;
  typename Backend::DeviceBuffer device_;
  LockedMemory<Backend> host_;
  Stream stream_;
  std::array<typename Backend::Event, place_count> filled_, emptied_;
  std::array<bool, place_count> sent_{};
  SpanTrace<Backend> trace_;
};

}  // namespace block_streamer::inline v1
