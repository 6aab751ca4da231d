// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/masters.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/pipeline/copy_out.hpp>
#include <block_streamer/train/background_updates.hpp>
#include <block_streamer/train/gradient_home.hpp>
#include <block_streamer/train/gradient_ledger.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief Brings the gradients of a block's masters from the device to the ledger, block by block,
/// while lower blocks compute. Where the device is the host they are handed over as they are.
/// Elsewhere they pass through two places of one block's size (converted to the masters' type on
/// the way), and go to the memory that becomes .grad; or, where .grad exists already, a step is
/// open, or other blocks use the tensor too, to a page-locked place from which the host adds or
/// updates: the host then waits for the copy of the block before. Such an update runs on a thread
/// of its own where the optimizer allows it, until the place is needed again.
/// **Threads.** The visitor's.
template <execution_backend Backend>
class GradientExit {
 public:
  using Stream = typename Backend::Stream;

  /// @param trace  is told of the copies out.
  GradientExit(Backend& backend, std::shared_ptr<const Masters> masters, bool computes_on_host,
               TraceSinkRef trace = {})
      : backend_{backend},
        masters_{std::move(masters)},
        computes_on_host_{computes_on_host},
        trace_{trace} {}
  GradientExit(const GradientExit&) = delete;
  GradientExit& operator=(const GradientExit&) = delete;
  ~GradientExit() { abandon(); }

  /// @brief Device memory held, in bytes: none before the first gradient.
  [[nodiscard]] std::uint64_t device_byte_count() const noexcept {
    return out_ ? out_->device_byte_count() : 0;
  }

  /// @param gradients    of the trained weights, on the device, undefined where nothing reached.
  /// @param of_adapters  passed on with the block as they are.
  /// @param compute      the stream that they are computed on.
  /// @returns the bytes that leave the device.
  std::uint64_t take(GradientLedger& ledger, BlockId block, std::span<const std::uint32_t> masters,
                     std::vector<at::Tensor> gradients, std::vector<at::Tensor> of_adapters,
                     Stream& compute) {
    for (std::size_t i = 0; i < masters.size(); ++i) check(masters[i], gradients[i]);
    if (backend_.host_addressable() || masters.empty()) {
      for (std::size_t i = 0; i < masters.size(); ++i)
        hand_over(ledger, masters[i], std::move(gradients[i]));
      ledger.complete(block, std::move(of_adapters));
      return 0;
    }
    const std::uint64_t sent =
        ship(ledger, block, masters, gradients, std::move(of_adapters), compute);
    if (ledger.updates())
      settle_until(ledger, 1);  // this block's copy runs while the next computes
    return sent;
  }
  /// @brief Waits for what is on its way, and hands it over.
  void settle(GradientLedger& ledger) {
    settle_until(ledger, 0);
    if (out_) out_->wait_all();
    background_.wait();
    ledger.complete_all();
  }
  /// @brief After a failure: nothing reads or writes the places any more, what they held is lost.
  void abandon() noexcept {
    background_.abandon();
    try {
      if (out_) out_->wait_all();
    } catch (...) {  // a lost device copies nothing
    }
    shipments_.clear();
  }

 private:
  struct Piece {
    std::uint32_t master = 0;
    at::Tensor home;          ///< the future .grad, or undefined: the host place
    std::uint64_t begin = 0;  ///< in the place
  };
  struct Shipment {
    BlockId block{};
    std::uint32_t place = 0;
    std::vector<Piece> pieces;
    std::vector<at::Tensor> of_adapters;
  };

  void check(std::uint32_t master, const at::Tensor& gradient) const {
    if (!gradient.defined() || gradient.layout() == at::kStrided) return;
    throw UnsupportedError{(*masters_)[master].name +
                           " has a sparse gradient: only dense ones are streamed"};
  }

  /// The engine's own tensors, in the master's type; copied if anybody else has them.
  void hand_over(GradientLedger& ledger, std::uint32_t master, at::Tensor gradient) const {
    if (!gradient.defined()) return;
    const c10::NoGradGuard no_grad;
    const auto dtype = (*masters_)[master].tensor.scalar_type();
    if (gradient.scalar_type() != dtype) gradient = gradient.to(dtype);
    const bool own = gradient.is_contiguous() && gradient.use_count() == 1 &&
                     gradient.storage().use_count() == 1;
    if (!own) gradient = at::clone(gradient, at::MemoryFormat::Contiguous);
    ledger.add(master, std::move(gradient), GradientMemory::given);
  }

  std::uint64_t ship(GradientLedger& ledger, BlockId block, std::span<const std::uint32_t> masters,
                     std::span<const at::Tensor> gradients, std::vector<at::Tensor> of_adapters,
                     Stream& compute) {
    if (!out_) out_.emplace(backend_, largest_block(), computes_on_host_, trace_);
    Shipment shipment{block, next_place_, {}, std::move(of_adapters)};
    next_place_ = (next_place_ + 1) % CopyOut<Backend>::place_count;
    free_place(ledger, shipment.place);
    out_->begin(shipment.place, compute);
    std::vector<typename CopyOut<Backend>::Piece> copies;
    std::uint64_t end = 0, sent = 0;
    for (std::size_t i = 0; i < masters.size(); ++i) {
      const std::uint32_t master = masters[i];
      if (!gradients[i].defined() || ledger.route(master) == GradientRoute::drop) continue;
      Piece piece{master, home_of(ledger, master), round_up(end, tensor_alignment)};
      const std::uint64_t byte_count = (*masters_)[master].tensor.nbytes();
      end = piece.begin + byte_count;
      const auto from = out_->device_place(shipment.place).subspan(piece.begin, byte_count);
      fill(from, master, gradients[i]);
      copies.push_back(
          {from, piece.home.defined() ? bytes_of(piece.home) : host_bytes(shipment.place, piece)});
      sent += byte_count;
      shipment.pieces.push_back(std::move(piece));
    }
    out_->send(shipment.place, copies, compute, {block});
    shipments_.push_back(std::move(shipment));
    return sent;
  }
  void fill(std::span<std::byte> place, std::uint32_t master, const at::Tensor& gradient) const {
    const c10::NoGradGuard no_grad;
    const at::Tensor& tensor = (*masters_)[master].tensor;
    view_of(place, {{}, dtype_of(tensor.scalar_type()), shape_of(tensor)}, gradient.device())
        .copy_(gradient);
  }
  [[nodiscard]] std::span<std::byte> host_bytes(std::uint32_t place, const Piece& piece) {
    return out_->host_place(place).subspan(piece.begin, (*masters_)[piece.master].tensor.nbytes());
  }
  /// Straight to where .grad will be, if it is not there yet and nothing is to be added.
  [[nodiscard]] at::Tensor home_of(const GradientLedger& ledger, std::uint32_t master) {
    const Master& known = (*masters_)[master];
    if (ledger.route(master) != GradientRoute::accumulate || known.use_count > 1 ||
        known.tensor.grad().defined()) {
      return {};
    }
    return home_.take(backend_, *masters_, master);
  }

  /// Shipments that left something in the host place are settled before it is used again.
  void free_place(GradientLedger& ledger, std::uint32_t place) {
    std::size_t last = 0;
    for (std::size_t i = 0; i < shipments_.size(); ++i) {
      const Shipment& shipment = shipments_[i];
      const bool kept = std::ranges::any_of(
          shipment.pieces, [](const Piece& piece) { return !piece.home.defined(); });
      if (shipment.place == place && kept) last = i + 1;
    }
    settle_until(ledger, shipments_.size() - last);
    background_.wait();  // an update may read what lies there
  }
  /// Settles the oldest until `left` are left.
  void settle_until(GradientLedger& ledger, std::size_t left) {
    while (shipments_.size() > left) {
      const Shipment shipment = std::move(shipments_.front());
      shipments_.pop_front();
      out_->wait(shipment.place);
      for (const Piece& piece : shipment.pieces) {
        if (piece.home.defined()) {
          backend_.touch_on_host(bytes_of(piece.home), Access::read);
          ledger.add(piece.master, piece.home, GradientMemory::given);
        } else {
          const at::Tensor& tensor = (*masters_)[piece.master].tensor;
          backend_.touch_on_host(host_bytes(shipment.place, piece), Access::read);
          ledger.add(piece.master,
                     view_of(host_bytes(shipment.place, piece),
                             {{}, dtype_of(tensor.scalar_type()), shape_of(tensor)}, at::kCPU),
                     GradientMemory::lent);
        }
      }
      ledger.complete(shipment.block, shipment.of_adapters, &background_);
    }
  }
  [[nodiscard]] std::uint64_t largest_block() const {
    std::uint64_t largest = 0;
    for (std::size_t b = 0; masters_ != nullptr && b < masters_->block_count(); ++b) {
      std::uint64_t byte_count = 0;
      for (const std::uint32_t m : masters_->of(block_at(b)))
        byte_count = round_up(byte_count, tensor_alignment) + (*masters_)[m].tensor.nbytes();
      largest = std::max(largest, byte_count);
    }
    return largest;
  }

  Backend backend_;
  std::shared_ptr<const Masters> masters_;
  bool computes_on_host_;
  TraceSinkRef trace_;
  std::optional<CopyOut<Backend>> out_;
  GradientHome<Backend> home_;
  std::deque<Shipment> shipments_;  ///< on their way, oldest first
  std::uint32_t next_place_ = 0;
  BackgroundUpdates background_;  // its update may read a host place: waits before they go
};

}  // namespace block_streamer::inline v1
