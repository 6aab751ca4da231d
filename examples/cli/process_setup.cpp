// SPDX-License-Identifier: Apache-2.0
#include "process_setup.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>

namespace block_streamer_cli {

void set_up_process() noexcept {
  for (int descriptor = STDIN_FILENO; descriptor <= STDERR_FILENO; ++descriptor) {
    // The lowest free number is what open() returns: those below are taken by now.
    if (::fcntl(descriptor, F_GETFD) == -1) static_cast<void>(::open("/dev/null", O_RDWR));
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace block_streamer_cli
