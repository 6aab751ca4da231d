// SPDX-License-Identifier: Apache-2.0
#pragma once

// The twins declare the same members; this is the one place that chooses. The CMake target defines
// the macro where it found liburing and links it.
#if defined(BLOCK_STREAMER_HAS_LIBURING)
#include <block_streamer/io/uring_ring_linux.hpp>
#else
#include <block_streamer/io/uring_ring_absent.hpp>
#endif
