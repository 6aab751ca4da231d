// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/models/decoder_block.hpp>
#include <block_streamer/models/decoder_model.hpp>

namespace block_streamer::inline v1::models {

/// A layer of Llama 2 and 3, SmolLM2 and others of model_type "llama".
using LlamaBlock = DecoderBlock;
/// @copydoc DecoderModel
using Llama = detail::FamilyModel<ModelFamily::llama>;

}  // namespace block_streamer::inline v1::models
