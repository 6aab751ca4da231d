// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/models/decoder_model.hpp>
#include <block_streamer/pipeline/options.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/train/streamed_matrix.hpp>

#include <memory>
#include <utility>

namespace block_streamer::inline v1::models {

/// @brief Streams the head of a model that was made with `head_resident = false`: from now on every
/// logits() fetches its slices one after another, and so does a backward through it.
/// @code
///   models::Llama model{checkpoint, {.embedding_resident = false, .head_resident = false}};
///   stream_head(model, FileStorage{model.head_map()}, HostBackend{}, {.prefetch_ahead = 1});
/// @endcode
/// @param storage  over model.head_map(). @param backend  of the model's device.
/// @param options  dtype is the model's whatever it says; a trace would mix slices with blocks, as
/// both are numbered from 0.
/// @throws BindingError, Error as a Streamer's construction.
/// **Cost.** Device memory: prefetch_ahead + 1 slots of a slice, one more where the stored type
/// differs from the model's.
template <storage_tier Storage, execution_backend Backend>
void stream_head(DecoderModel& model, Storage storage, Backend backend,
                 PipelineOptions options = {}) {
  options.dtype = model.dtype();
  const std::string& name = model.layout().head;
  model.use_head(std::make_shared<StreamedMatrix<Backend>>(
      name, model.config().hidden_size, model.head_slices(), AnyStorage{std::move(storage)},
      std::move(backend), options));
}

}  // namespace block_streamer::inline v1::models
