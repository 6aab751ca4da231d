// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/detail/config.hpp>

// With mingw-w64's POSIX threads, Asio picks the system's threads or these by whether a standard
// header that knows them came first: two units of one program then disagree about the layout of a
// thread pool, and queued work is lost. The CMake targets define the macro for every unit.
#if defined(__MINGW32__) && defined(_GLIBCXX_HAS_GTHREADS) && !defined(BOOST_ASIO_HAS_PTHREADS)
#error "block_streamer: define BOOST_ASIO_HAS_PTHREADS=1 for every unit of the program"
#endif
