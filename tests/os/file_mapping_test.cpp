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

std::span<std::byte> writable(std::string& text) {
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

TEST_CASE("a mapping copies any range") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("mapped", 70'001);
  support::write_text(folder / "f", data);
  const bs::FileMapping mapping{folder / "f"};
  REQUIRE(mapping.size() == data.size());
  for (const auto& [offset, count] :
       {std::pair<std::size_t, std::size_t>{0, 70'001}, {4095, 4098}, {70'000, 1}, {70'001, 0}}) {
    std::string out(count, '\0');
    REQUIRE_FALSE(mapping.copy_out(offset, writable(out)));
    CHECK(out == data.substr(offset, count));
  }
  std::string out(2, '\0');
  CHECK(mapping.copy_out(70'000, writable(out)) == bs::FileErrc::shrank);
  CHECK(mapping.copy_out(~std::uint64_t{0}, writable(out)) == bs::FileErrc::shrank);
}

TEST_CASE("b65 a file cut after mapping is an error, not a signal") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("cut", 5 * 4096);
  support::write_text(folder / "f", data);
  const bs::FileMapping mapping{folder / "f"};
  fs::resize_file(folder / "f", 2 * 4096 + 100);
  std::string out(4096, '\0');
  CHECK(mapping.copy_out(4 * 4096, writable(out)) == bs::FileErrc::shrank);
  SECTION("also where the range straddles the cut") {
    std::string both(3 * 4096, '\0');
    CHECK(mapping.copy_out(4096, writable(both)) == bs::FileErrc::shrank);
  }
  SECTION("also on the last page, which still answers with zeros") {
    std::string tail(50, '\0');
    CHECK(mapping.copy_out(2 * 4096 + 80, writable(tail)) == bs::FileErrc::shrank);
  }
  SECTION("what is left is still read") {
    std::string head(2 * 4096 + 100, '\0');
    CHECK_FALSE(mapping.copy_out(0, writable(head)));
    CHECK(head == data.substr(0, head.size()));
  }
}

TEST_CASE("a file deleted after mapping is still read whole") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("gone", 9'000);
  support::write_text(folder / "f", data);
  const bs::FileMapping mapping{folder / "f"};
  fs::remove(folder / "f");
  std::string out(9'000, '\0');
  CHECK_FALSE(mapping.copy_out(0, writable(out)));
  CHECK(out == data);
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
    if (mapping.copy_out(4'000, writable(out)) || out != data.substr(4'000, 5'000)) ::_exit(1);
    if (::truncate((folder / "f").c_str(), 4096) != 0) ::_exit(2);
    ::_exit(mapping.copy_out(4'000, writable(out)) == bs::FileErrc::shrank ? 0 : 3);
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

TEST_CASE("an empty file maps to nothing and a missing one is refused") {
  const support::TempFolder folder;
  support::write_text(folder / "empty", "");
  const bs::FileMapping mapping{folder / "empty"};
  CHECK(mapping.size() == 0);
  CHECK_FALSE(mapping.copy_out(0, {}));
  mapping.drop_pages({0, 100});
  CHECK_THROWS_AS(bs::FileMapping{folder / "none"}, bs::StorageError);
}

TEST_CASE("dropped pages read the same again, and neighbours on shared pages stay") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("drop", 4 * 4096 + 5);
  support::write_text(folder / "f", data);
  bs::FileMapping first{folder / "f"};
  bs::FileMapping mapping = std::move(first);
  std::string out(data.size(), '\0');
  mapping.will_need({10, 4096});
  REQUIRE_FALSE(mapping.copy_out(0, writable(out)));
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
  REQUIRE_FALSE(mapping.copy_out(0, writable(out)));
  CHECK(out == data);
}
