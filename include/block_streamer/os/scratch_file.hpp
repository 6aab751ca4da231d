// SPDX-License-Identifier: Apache-2.0
#pragma once

// The platform twins declare the same members; this is the one place that chooses.
#if defined(_WIN32)
#include <block_streamer/os/scratch_file_windows.hpp>
#elif defined(__unix__) || defined(__APPLE__)
#include <block_streamer/os/scratch_file_posix.hpp>
#else
#error "block_streamer/os/scratch_file.hpp: only POSIX systems and Windows are supported"
#endif
