// SPDX-License-Identifier: Apache-2.0
#pragma once

// One place chooses. The twins share what they report (file_access.hpp); how a file gets there
// differs: POSIX systems switch an open descriptor, Windows decides when it opens one.
#if defined(_WIN32)
#include <block_streamer/os/direct_io_windows.hpp>
#elif defined(__unix__) || defined(__APPLE__)
#include <block_streamer/os/direct_io_posix.hpp>
#else
#error "block_streamer/os/direct_io.hpp: only POSIX systems and Windows are supported"
#endif
