// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "jobs.hpp"
#include "loaded_model.hpp"

#include <block_streamer/core/error.hpp>

namespace block_streamer_cli {

/// @brief Trains the adapter that is woven in, or a new one, and saves it.
template <class Backend>
[[nodiscard]] FinetuneReport run_finetune(LoadedModel<Backend>&, const FinetuneJob&) {
  throw block_streamer::UnsupportedError{"finetune is not built in yet"};
}

}  // namespace block_streamer_cli
