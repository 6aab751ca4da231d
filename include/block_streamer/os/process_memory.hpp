// SPDX-License-Identifier: Apache-2.0
#pragma once

// The platform twins declare the same members; this is the one place that chooses.
#if defined(_WIN32)
#include <block_streamer/os/process_memory_windows.hpp>
#elif defined(__unix__) || defined(__APPLE__)
#include <block_streamer/os/process_memory_posix.hpp>
#else
#error "block_streamer/os/process_memory.hpp: only POSIX systems and Windows are supported"
#endif
