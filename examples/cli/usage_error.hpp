// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

namespace block_streamer_cli {

/// The command line is wrong whatever the files hold that it names: exit code 2.
class UsageError : public block_streamer::Error {
 public:
  using Error::Error;
};

}  // namespace block_streamer_cli
