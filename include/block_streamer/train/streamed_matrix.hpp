// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/streamable_block.hpp>
#include <block_streamer/block/weights.hpp>
#include <block_streamer/checkpoint/row_slices.hpp>
#include <block_streamer/plan/visit_order.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/train/sliced_matrix.hpp>
#include <block_streamer/train/streamed_run.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief One slice of a matrix as a block: it shows its rows to the context. Nothing flows from
/// slice to slice.
class SliceBlock {
 public:
  using Hidden = at::Tensor;
  using Context = const SlicedMatrix::Use;

  SliceBlock(std::string name, const RowRange& rows, std::uint64_t column_count)
      : rows_{rows}, spec_{std::move(name), {rows.count, column_count}} {}

  [[nodiscard]] std::vector<WeightSpec> weight_specs() const { return {spec_}; }
  [[nodiscard]] at::Tensor forward(const Weights& weights, const at::Tensor& nothing,
                                   const SlicedMatrix::Use& use) const {
    use(rows_, weights[0]);
    return nothing;
  }

 private:
  RowRange rows_;
  WeightSpec spec_;
};
static_assert(streamable_block<SliceBlock>);

/// @brief A matrix whose slices are fetched for each visit, through a pipeline of its own: with at
/// most prefetch_ahead + 1 of them resident, and those that device_budget caches.
/// **Threads.** One visit at a time; a second is refused. **Lifetime.** Graphs made with it share
/// it.
template <execution_backend Backend>
class StreamedMatrix final : public SlicedMatrix {
 public:
  /// @param storage  one block a slice, as make_row_slice_map() lays them out for tensor `name`.
  /// @param options  dtype: what the slices are shown in; nullopt: as stored.
  /// @throws BindingError if stored and expected slices differ, Error if memory does not suffice.
  StreamedMatrix(const std::string& name, std::uint64_t column_count, std::vector<RowRange> slices,
                 AnyStorage storage, Backend backend, const PipelineOptions& options)
      : slices_{std::move(slices)},
        run_{blocks_of(name, column_count, slices_), std::move(storage), std::move(backend),
             options, options.dtype},
        nothing_{at::empty({0})} {}

  void visit_forward(bool backward_follows, const Use& use) override {
    const std::size_t n = slices_.size();
    const VisitOrder forward = ascending(0, n);
    visit(forward, joined(backward_follows ? descending(0, n) : forward, forward), use);
  }
  void visit_backward(const Use& use) override {
    const std::size_t n = slices_.size();
    const VisitOrder backward = descending(0, n);
    visit(backward, joined(ascending(0, n), backward), use);
  }
  [[nodiscard]] const std::vector<RowRange>& slices() const noexcept override { return slices_; }
  [[nodiscard]] Statistics statistics() const override { return run_.pipeline().statistics(); }

  /// @brief Slots, their size, staging: what it takes of memory.
  [[nodiscard]] const TransferShape& shape() const noexcept { return run_.pipeline().shape(); }
  /// @brief Waits until nothing is in flight.
  void drain() { run_.pipeline().drain(); }

 private:
  using Run = StreamedRun<SliceBlock, Backend>;

  [[nodiscard]] static std::vector<SliceBlock> blocks_of(const std::string& name,
                                                         std::uint64_t column_count,
                                                         const std::vector<RowRange>& slices) {
    std::vector<SliceBlock> blocks;
    blocks.reserve(slices.size());
    for (const RowRange& rows : slices) {
      blocks.emplace_back(slice_name(name, rows), rows, column_count);
    }
    return blocks;
  }

  void visit(const VisitOrder& order, const VisitOrder& hint, const Use& use) {
    const typename Run::Walk walk{run_};
    run_.walk(order, hint, [&](BlockId, auto&& run_block, std::span<const std::byte>) {
      (void)run_block(nothing_, use, /*training=*/false);
    });
  }

  std::vector<RowRange> slices_;
  mutable Run run_;  // StreamedRun hands its pipeline out of mutable objects only
  at::Tensor nothing_;
};

}  // namespace block_streamer::inline v1
