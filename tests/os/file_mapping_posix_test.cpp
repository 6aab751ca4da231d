// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/file_mapping.hpp>

#include <support/safetensors_files.hpp>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {

std::span<std::byte> bytes_into(std::string& text) {
  return std::as_writable_bytes(std::span{text});
}

/// From now on this process gets EPERM from process_vm_readv, as in a sandbox.
bool forbid_guarded_copy() {
  std::array<sock_filter, 4> rules{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{static_cast<unsigned short>(rules.size()), rules.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace

TEST_CASE("b65 a file cut after mapping is an error, not a signal") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("cut", 5 * 4096);
  support::write_text(folder / "f", data);
  const bs::FileMapping mapping{folder / "f"};
  fs::resize_file(folder / "f", 2 * 4096 + 100);
  std::string out(4096, '\0');
  CHECK(mapping.copy_out(4 * 4096, bytes_into(out)) == bs::FileErrc::shrank);
  SECTION("also where the range straddles the cut") {
    std::string both(3 * 4096, '\0');
    CHECK(mapping.copy_out(4096, bytes_into(both)) == bs::FileErrc::shrank);
  }
  SECTION("also on the last page, which still answers with zeros") {
    std::string tail(50, '\0');
    CHECK(mapping.copy_out(2 * 4096 + 80, bytes_into(tail)) == bs::FileErrc::shrank);
  }
  SECTION("what is left is still read") {
    std::string head(2 * 4096 + 100, '\0');
    CHECK_FALSE(mapping.copy_out(0, bytes_into(head)));
    CHECK(head == data.substr(0, head.size()));
  }
}

TEST_CASE("b67 a file larger than all memory is mapped, read-only and shared") {
  const support::TempFolder folder;
  const fs::path file = folder / "larger";
  std::ifstream meminfo{"/proc/meminfo"};
  std::uint64_t kibibytes = 0;
  for (std::string line; std::getline(meminfo, line);) {
    if (line.starts_with("MemTotal:") || line.starts_with("SwapTotal:")) {
      kibibytes += std::stoull(line.substr(line.find(':') + 1));
    }
  }
  const std::uint64_t size = kibibytes * 1024 * 2 + 4096;
  support::write_text(file, "begin");
  std::error_code error;
  fs::resize_file(file, size, error);
  if (error) {
    WARN("skipped: no file of " << size << " bytes here: " << error.message());
    return;
  }
  const bs::FileMapping mapping{file};
  CHECK(mapping.size() == size);
  std::string begin(5, '?'), end(5, '?');
  CHECK_FALSE(mapping.copy_out(0, bytes_into(begin)));
  CHECK_FALSE(mapping.copy_out(size - 5, bytes_into(end)));
  CHECK(begin == "begin");
  CHECK(end == std::string(5, '\0'));
  std::ifstream maps{"/proc/self/maps"};
  int found = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(file.string()) == std::string::npos) continue;
    ++found;
    CHECK(line.find(" r--s ") != std::string::npos);  // nothing of it can be written to
  }
  CHECK(found == 1);
}

TEST_CASE("where the guarded copy is forbidden the file is read instead") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("sandbox", 3 * 4096);
  support::write_text(folder / "f", data);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // Exit codes instead of checks: the child must not report for the parent's test run.
    if (!forbid_guarded_copy()) ::_exit(77);
    const bs::FileMapping mapping{folder / "f"};
    std::string out(5'000, '\0');
    if (mapping.copy_out(4'000, bytes_into(out)) || out != data.substr(4'000, 5'000)) ::_exit(1);
    if (::truncate((folder / "f").c_str(), 4096) != 0) ::_exit(2);
    ::_exit(mapping.copy_out(4'000, bytes_into(out)) == bs::FileErrc::shrank ? 0 : 3);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) {
    WARN("skipped: this system does not let a process restrict its own calls");
  } else {
    CHECK(WEXITSTATUS(status) == 0);
  }
}

TEST_CASE("dropped pages read the same again, and neighbours on shared pages stay") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("drop", 4 * 4096 + 5);
  support::write_text(folder / "f", data);
  bs::FileMapping first{folder / "f"};
  bs::FileMapping mapping = std::move(first);
  std::string out(data.size(), '\0');
  mapping.will_need({10, 4096});
  REQUIRE_FALSE(mapping.copy_out(0, bytes_into(out)));
  const auto resident = [&](std::size_t page) {
    // Whether this process has the page mapped; mincore would tell of the page cache.
    const int map = ::open("/proc/self/pagemap", O_RDONLY);
    const auto at = reinterpret_cast<std::uintptr_t>(mapping.bytes().data()) / 4096 + page;
    std::uint64_t entry = 0;
    const bool read = ::pread(map, &entry, 8, static_cast<off_t>(at * 8)) == 8;
    ::close(map);
    if (!read) return false;
    return (entry >> 63) != 0;
  };
  const bool known = resident(0);
  if (!known) WARN("skipped: this system does not tell which pages are mapped");
  mapping.drop_pages({100, 3 * 4096});
  if (known) {
    CHECK(resident(0));
    CHECK_FALSE(resident(1));
    CHECK_FALSE(resident(2));
    CHECK(resident(3));
  }
  REQUIRE_FALSE(mapping.copy_out(0, bytes_into(out)));
  CHECK(out == data);
}
