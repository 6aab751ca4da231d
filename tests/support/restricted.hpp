// SPDX-License-Identifier: Apache-2.0
// This program, started again where the system gives less: under a filter of system calls, under a
// limit, with mounts of its own, in a control group.
#pragma once

#include <support/catch.hpp>

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/loop.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace support {

/// True under a sanitizer, which takes memory of its own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif
#else
inline constexpr bool sanitized = false;
#endif

/// The exit status of a child that could not be restricted: its case is skipped.
inline constexpr int cannot_restrict = 77;

/// From now on the call answers with that error: in every thread, and in programs started later.
[[nodiscard]] inline bool forbid(long call, int error) {
  std::array<sock_filter, 4> rules{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{static_cast<unsigned short>(rules.size()), rules.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

/// Also for root, once another program is started.
[[nodiscard]] inline bool limit_locked_memory(std::size_t byte_count) {
  static_cast<void>(::prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0));
  const rlimit limit{byte_count, byte_count};
  return ::setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
}

[[nodiscard]] inline bool put(const std::filesystem::path& file, const std::string& text) {
  std::ofstream out{file};
  out << text << std::flush;
  return out.good();
}

/// Mounts of this process's own, which end with it: as root, or as the root of a user namespace.
[[nodiscard]] inline bool own_mounts() {
  const std::string user = std::to_string(::geteuid()), group = std::to_string(::getegid());
  if (::unshare(CLONE_NEWNS) != 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    if (!put("/proc/self/setgroups", "deny") || !put("/proc/self/uid_map", "0 " + user + " 1") ||
        !put("/proc/self/gid_map", "0 " + group + " 1")) {
      return false;
    }
  }
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

/// A file system in memory that holds so many bytes. @pre own_mounts()
[[nodiscard]] inline bool mount_memory(const std::filesystem::path& at, std::uint64_t byte_count,
                                       unsigned long flags = 0) {
  const std::string size = "size=" + std::to_string(byte_count);
  return ::mount("none", at.c_str(), "tmpfs", flags, size.c_str()) == 0;
}

/// A file system over another, as containers have it. @pre own_mounts()
/// @param at  its files go to a folder `upper` beside it.
[[nodiscard]] inline bool mount_overlay(const std::filesystem::path& at) {
  const std::filesystem::path beside = at.parent_path();
  for (const char* folder : {"lower", "upper", "work"}) {
    std::filesystem::create_directory(beside / folder);
  }
  const std::string options = "lowerdir=" + (beside / "lower").string() +
                              ",upperdir=" + (beside / "upper").string() +
                              ",workdir=" + (beside / "work").string();
  return ::mount("none", at.c_str(), "overlay", 0, options.c_str()) == 0 ||
         ::mount("none", at.c_str(), "overlay", 0, (options + ",userxattr").c_str()) == 0;
}

/// An ext4 on a device whose sectors have 4096 bytes: a file beside the folder, as a loop device.
/// Needs the machine's root. @pre own_mounts()
[[nodiscard]] inline bool mount_4096_byte_sectors(const std::filesystem::path& at) {
#ifdef LOOP_CONFIGURE
  const std::string image = (at.parent_path() / "disk").string();
  if (!put(image, "")) return false;
  std::filesystem::resize_file(image, std::uint64_t{64} << 20);
  const std::string make = "PATH=$PATH:/sbin:/usr/sbin mkfs.ext4 -q -F -b 4096 '" + image + "'";
  if (std::system((make + " >/dev/null 2>&1").c_str()) != 0) return false;
  const int control = ::open("/dev/loop-control", O_RDWR | O_CLOEXEC);
  for (int attempt = 0; control >= 0 && attempt < 8; ++attempt) {  // others take devices as well
    const std::string device = "/dev/loop" + std::to_string(::ioctl(control, LOOP_CTL_GET_FREE));
    const int loop = ::open(device.c_str(), O_RDWR | O_CLOEXEC);
    if (loop < 0) return false;
    loop_config config{};
    config.fd = static_cast<std::uint32_t>(::open(image.c_str(), O_RDWR | O_CLOEXEC));
    config.block_size = 4096;
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR;  // goes with its last mount
    if (::ioctl(loop, LOOP_CONFIGURE, &config) != 0) continue;
    return ::mount(device.c_str(), at.c_str(), "ext4", 0, nullptr) == 0;
  }
#else
  static_cast<void>(at);
#endif
  return false;
}

/// A control group below this process's own, with a limit of memory.
class MemoryGroup {
 public:
  explicit MemoryGroup(std::uint64_t byte_count) {
    namespace fs = std::filesystem;
    std::ifstream groups{"/proc/self/cgroup"};
    for (std::string line; !folder_ && std::getline(groups, line);) {
      const bool unified = line.starts_with("0::");
      const std::size_t colon = line.find(":memory:");
      if (!unified && colon == std::string::npos) continue;
      const std::string path = unified ? line.substr(3) : line.substr(colon + 8);
      const fs::path parent = (unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") + path;
      const fs::path folder = parent / ("block_streamer_" + std::to_string(::getpid()));
      std::error_code error;
      if (!fs::create_directory(folder, error) || error) continue;
      const char* const limit = unified ? "memory.max" : "memory.limit_in_bytes";
      if (fs::exists(folder / limit, error) && put(folder / limit, std::to_string(byte_count))) {
        folder_ = folder;
      } else {
        ::rmdir(folder.c_str());
      }
    }
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;
  ~MemoryGroup() {
    if (folder_) ::rmdir(folder_->c_str());
  }
  /// The calling process, and what it starts, live in the group from now on.
  [[nodiscard]] bool join() const {
    return folder_ && put(*folder_ / "cgroup.procs", std::to_string(::getpid()));
  }

 private:
  std::optional<std::filesystem::path> folder_;
};

/// Waits for a child. @returns false if it could not be restricted, which is told.
inline bool expect_ended_well(pid_t child) {
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == cannot_restrict) {
    WARN("skipped: this system does not let a process restrict itself so");
    return false;
  }
  CHECK(WEXITSTATUS(status) == 0);
  return true;
}

/// Runs one hidden case of this program after `restrict_it`, which says whether it succeeded.
/// @param expected  for the case: expectation().
template <class Restrict>
bool run_restricted(const char* name, const std::string& expected, Restrict restrict_it) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::setenv("BLOCK_STREAMER_EXPECTED", expected.c_str(), 1);
    if (!restrict_it()) ::_exit(cannot_restrict);
    ::execl("/proc/self/exe", "restricted", name, static_cast<char*>(nullptr));
    ::_exit(cannot_restrict);
  }
  return expect_ended_well(child);
}

/// What run_restricted() was given.
[[nodiscard]] inline std::string expectation() {
  const char* const expected = std::getenv("BLOCK_STREAMER_EXPECTED");
  REQUIRE(expected != nullptr);
  return expected;
}

}  // namespace support
