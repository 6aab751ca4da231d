// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

namespace block_streamer::inline v1 {

/// What blocks share in a pass if they share nothing.
struct NoContext {};

}  // namespace block_streamer::inline v1
