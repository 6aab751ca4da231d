// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "jobs.hpp"
#include "loaded_model.hpp"

#include <block_streamer/core/error.hpp>

namespace block_streamer_cli {

/// @brief The mean loss over the data.
template <class Backend>
[[nodiscard]] EvaluateReport run_evaluate(LoadedModel<Backend>&, const EvaluateJob&) {
  throw block_streamer::UnsupportedError{"evaluate is not built in yet"};
}

}  // namespace block_streamer_cli
