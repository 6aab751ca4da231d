// SPDX-License-Identifier: Apache-2.0
#include "interrupt.hpp"

#include <csignal>

#include <unistd.h>

namespace block_streamer_cli {
namespace {

// A signal handler reaches nothing but global state.
volatile std::sig_atomic_t signals_seen = 0;

extern "C" void remember_signal(int) {
  if (signals_seen != 0) {
    // What stands on the terminal's last line stays there, and the shell begins a new one.
    if (::isatty(STDERR_FILENO) != 0) {
      [[maybe_unused]] const auto written = ::write(STDERR_FILENO, "\n", 1);
    }
    ::_exit(interrupted_exit_code);
  }
  signals_seen = 1;
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = remember_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction hang_up {};
  sigaction(SIGHUP, nullptr, &hang_up);
  if (hang_up.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // nohup stays
}

bool interrupted() noexcept {
  return signals_seen != 0;
}

}  // namespace block_streamer_cli
