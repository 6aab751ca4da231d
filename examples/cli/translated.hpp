// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>

#include <c10/util/Exception.h>

#include <string>

namespace block_streamer_cli {

/// @brief Calls `action`; LibTorch's errors leave as the library's, without their stack traces.
template <class F>
auto translated(F&& action) {
  try {
    return action();
  } catch (const c10::OutOfMemoryError& error) {
    throw block_streamer::Error{std::string{"out of memory: "} + error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    const bool memory = what.find("not enough memory") != std::string::npos ||
                        what.find("out of memory") != std::string::npos ||
                        what.find("alloc_cpu") != std::string::npos;
    throw block_streamer::Error{(memory ? "out of memory (a smaller --batch or --seq-len, or "
                                          "--storage file, needs less): "
                                        : "LibTorch: ") +
                                what};
  }
}

}  // namespace block_streamer_cli
