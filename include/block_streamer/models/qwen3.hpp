// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/models/decoder_block.hpp>
#include <block_streamer/models/decoder_model.hpp>

namespace block_streamer::inline v1::models {

/// A layer of the dense Qwen3 models: a Llama layer with norms over each query and key head.
using Qwen3Block = DecoderBlock;
/// @copydoc DecoderModel
using Qwen3 = detail::FamilyModel<ModelFamily::qwen3>;

}  // namespace block_streamer::inline v1::models
