// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/config.hpp>

#include <cerrno>
#include <string>
#include <system_error>

namespace block_streamer::inline v1 {

/// @brief Why there is no ring, and what would help, from the error number of its set-up.
[[nodiscard]] inline std::string uring_refusal(int code) {
  const std::string why = std::error_code{code, std::generic_category()}.message();
  const auto text = [&why](const std::string& remedy) {
    return "io_uring is refused: " + why + " (" + remedy + ")";
  };
  switch (code) {
    case EPERM:
    case EACCES:
      return text(
          "allow io_uring in the container's seccomp profile, or set sysctl "
          "kernel.io_uring_disabled=0");
    case ENOSYS:
      return text("the kernel is built without it, or the container's seccomp profile hides it");
    case ENOMEM:
      return text("raise the limit of locked memory, ulimit -l, or close other rings of this user");
    case EMFILE:
    case ENFILE:
      return text("raise the limit of open files, ulimit -n");
    case EINVAL:
    case EOPNOTSUPP:
      return text("the kernel is too old: 5.6 or newer is needed");
    default:
      return "io_uring is refused: " + why;
  }
}

}  // namespace block_streamer::inline v1
