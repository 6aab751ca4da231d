// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/checkpoint/row_slices.hpp>
#include <block_streamer/core/expects.hpp>
#include <block_streamer/trace/statistics.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// @brief A frozen matrix (R, C) that is shown slice by slice: it may be larger than what is
/// resident of it at once. **Threads.** One visit at a time.
class SlicedMatrix {
 public:
  /// Is shown rows `rows` of the matrix as (rows.count, C); they are valid inside the call.
  using Use = std::function<void(const RowRange& rows, const at::Tensor& weight)>;

  SlicedMatrix() = default;
  SlicedMatrix(const SlicedMatrix&) = delete;
  SlicedMatrix& operator=(const SlicedMatrix&) = delete;
  virtual ~SlicedMatrix() = default;

  /// @brief Shows each slice once, the first one first.
  /// @param backward_follows  visit_backward() is what is expected next: a hint.
  virtual void visit_forward(bool backward_follows, const Use& use) = 0;
  /// @brief Shows each slice once, the last one first: it is the one that may still be there.
  virtual void visit_backward(const Use& use) = 0;

  [[nodiscard]] virtual const std::vector<RowRange>& slices() const noexcept = 0;
  /// @brief What moving the slices has cost so far; zeros if they stay where they are.
  [[nodiscard]] virtual Statistics statistics() const { return {}; }

  /// @brief R.
  [[nodiscard]] std::int64_t row_count() const noexcept {
    const RowRange& last = slices().back();
    return static_cast<std::int64_t>(last.begin + last.count);
  }
};

/// @brief A matrix that is on the device, in the same slices as one that is not. What a kernel
/// computes depends on the shape that it is given, so both are computed in the same shapes.
class ResidentMatrix final : public SlicedMatrix {
 public:
  /// @param matrix  (R, C), contiguous. @pre the slices cover its rows in order.
  ResidentMatrix(at::Tensor matrix, std::vector<RowRange> slices)
      : matrix_{std::move(matrix)}, slices_{std::move(slices)} {
    expects(!slices_.empty() && matrix_.dim() == 2 && row_count() == matrix_.size(0),
            "the slices cover the matrix");
  }

  void visit_forward(bool, const Use& use) override {
    for (const RowRange& rows : slices_) use(rows, at(rows));
  }
  void visit_backward(const Use& use) override {
    for (std::size_t i = slices_.size(); i-- > 0;) use(slices_[i], at(slices_[i]));
  }
  [[nodiscard]] const std::vector<RowRange>& slices() const noexcept override { return slices_; }

 private:
  [[nodiscard]] at::Tensor at(const RowRange& rows) const {
    return matrix_.narrow(0, static_cast<std::int64_t>(rows.begin),
                          static_cast<std::int64_t>(rows.count));
  }

  at::Tensor matrix_;
  std::vector<RowRange> slices_;
};

}  // namespace block_streamer::inline v1
