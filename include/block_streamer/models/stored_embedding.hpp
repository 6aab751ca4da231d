// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/stored_rows.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/core/dtype.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace block_streamer::inline v1::models {

/// @brief Rows of an embedding that stays in its file, for the tokens at hand.
/// @param ids  (…), i64, on the CPU, each a row of the table.
/// @returns (…, C) in `dtype` on `device`: the bits of a look-up in a table that was loaded there.
/// @throws StorageError as StoredRows::gather().
/// **Cost.** Each distinct row is read once, converted on the CPU, and copied to the device, which
/// the host waits for. Memory: the distinct rows, in both types.
[[nodiscard]] inline at::Tensor embed_stored(const StoredRows& table, const at::Tensor& ids,
                                             DType dtype, const at::Device& device) {
  const c10::NoGradGuard no_grad;
  const at::Tensor dense = ids.contiguous();
  const std::int64_t* const begin = dense.const_data_ptr<std::int64_t>();
  const std::int64_t* const end = begin + dense.numel();
  std::vector<std::int64_t> rows{begin, end};
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  const at::Tensor places = at::empty(dense.sizes(), dense.options());
  std::transform(begin, end, places.mutable_data_ptr<std::int64_t>(), [&rows](std::int64_t id) {
    return std::lower_bound(rows.begin(), rows.end(), id) - rows.begin();
  });
  const at::Tensor gathered = table.gather(rows).to(scalar_type_of(dtype)).to(device);
  return at::embedding(gathered, places.to(device));
}

}  // namespace block_streamer::inline v1::models
