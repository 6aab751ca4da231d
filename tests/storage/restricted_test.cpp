// SPDX-License-Identifier: Apache-2.0
// What storage does where the system refuses io_uring, or memory to pin: this program, started
// again under a filter of system calls or a limit. The hidden cases are what then runs.
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/storage/pooled.hpp>
#include <block_streamer/storage/uring_storage.hpp>

#include <storage/pattern_files.hpp>
#include <storage/pattern_reader.hpp>
#include <support/catch.hpp>

#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <string>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

constexpr int cannot_restrict = 77;

/// From now on, programs started later included, the call answers with that error.
[[maybe_unused]] bool forbid(long call, int error) {
  std::array<sock_filter, 4> rules{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{static_cast<unsigned short>(rules.size()), rules.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/// Also for root, once another program is started.
[[maybe_unused]] bool limit_locked_memory(std::size_t byte_count) {
  static_cast<void>(::prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0));
  const rlimit limit{byte_count, byte_count};
  return ::setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
}

void expect_ended_well(pid_t child) {
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == cannot_restrict) {
    WARN("skipped: this system does not let a process restrict itself");
  } else {
    CHECK(WEXITSTATUS(status) == 0);
  }
}

/// Runs one hidden case of this program under a restriction.
template <class Restrict>
void run_restricted(const char* name, const char* expected, Restrict restrict_it) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::setenv("BLOCK_STREAMER_EXPECTED", expected, 1);
    if (!restrict_it()) ::_exit(cannot_restrict);
    ::execl("/proc/self/exe", "restricted", name, static_cast<char*>(nullptr));
    ::_exit(cannot_restrict);
  }
  expect_ended_well(child);
}

/// Every block through a pipeline with slots apart from storage, against the files.
void check_streamed(bs::AnyStorage storage, const PatternFiles& files) {
  bs::HostBackend backend{bs::HostMode::detached};
  auto compute = backend.make_stream();
  auto passed = backend.make_event();
  bs::PipelineOptions options;
  options.chunk_byte_count = 65'536;
  options.staging_byte_count = 4 * 65'536;
  bs::BlockPipeline<bs::HostBackend> pipeline{std::move(storage), backend, options};
  const bs::VisitOrder order = bs::ascending(0, files.map.blocks().size());
  for (int round = 0; round < 3; ++round) {
    if (round == 2) pipeline.close();  // staging goes and comes again
    auto pass = pipeline.begin_pass(order, order, compute);
    for (std::size_t b = 0; !pass.done(); ++b) {
      const auto lease = pass.acquire();
      backend.record(passed, compute);
      backend.synchronize(passed);  // the copies were waited for by the compute stream
      const bs::BlockSource& source = files.map.blocks()[b];
      for (const bs::Segment& s : source.image.segments) {
        const auto from = std::span{files.images[b]}.subspan(s.image_offset, s.byte_count);
        REQUIRE(std::ranges::equal(lease.bytes().subspan(s.slot_offset, s.byte_count), from));
      }
    }
  }
}

void check_described(const std::string& text) {
  INFO(text);
  const char* const expected = std::getenv("BLOCK_STREAMER_EXPECTED");
  REQUIRE(expected != nullptr);
  CHECK(text.find(expected) != std::string::npos);
}

}  // namespace

TEST_CASE("restricted: no ring", "[.]") {
  const PatternFiles files{512};
  bs::UringStorage storage{files.map};
  CHECK_FALSE(storage.uses_ring());
  CHECK(storage.describe().find("thread pool") == 0);
  check_described(storage.describe());
  check_whole_images(storage, files.images);
  check_streamed(std::move(storage), files);
}

TEST_CASE("restricted: little memory to pin", "[.]") {
  const PatternFiles files{512};
  bs::UringRuntime runtime;
  if (!runtime.running()) return;
  bs::UringStorage storage{runtime, files.map};
  check_whole_images(storage, files.images);
  check_streamed(bs::UringStorage{runtime, files.map}, files);
  Reads later;  // the report follows a piece of work
  later.start(storage, bs::BlockId{1}, {0, files.images[1].size()});
  later.check_all(files.images);
  check_described(storage.describe());
}

TEST_CASE("a pipeline streams through a ring, pinned where the limits allow") {
  const PatternFiles files{512};
  check_streamed(bs::UringStorage{files.map}, files);
  const PatternFiles in_memory{1, "/dev/shm"};
  check_streamed(bs::UringStorage{in_memory.map}, in_memory);
}

#if defined(BLOCK_STREAMER_HAS_LIBURING)
TEST_CASE("b52 b53 a ring that is forbidden in any way is a thread pool, with the reason") {
  const auto under = [](long call, int error, const char* expected) {
    run_restricted("restricted: no ring", expected, [=] { return forbid(call, error); });
  };
  under(__NR_io_uring_setup, EPERM, "Operation not permitted");
  under(__NR_io_uring_setup, ENOSYS, "Function not implemented");
  under(__NR_io_uring_setup, ENOMEM, "Cannot allocate memory");
  under(__NR_io_uring_enter, EPERM, "Operation not permitted");
  under(__NR_io_uring_register, EPERM, "Operation not permitted");
}

TEST_CASE("b51 with 64 KiB of memory to lock, reads are plain and right") {
  run_restricted("restricted: little memory to pin", "plain buffers",
                 [] { return limit_locked_memory(65'536); });
}
#else
TEST_CASE("without liburing the tier is a thread pool and says so") {
  const PatternFiles files{512};
  bs::UringStorage storage{files.map};
  CHECK_FALSE(storage.uses_ring());
  CHECK(storage.describe().find("built without liburing") != std::string::npos);
  check_streamed(std::move(storage), files);
}
#endif

TEST_CASE("a pool to which the system gives some of its threads only is an error and no hang") {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    constexpr uid_t nobody_else = 54'321;  // the limit does not bind root
    if (::geteuid() == 0 && ::setuid(nobody_else) != 0) ::_exit(cannot_restrict);
    const rlimit limit{3, 3};
    if (::setrlimit(RLIMIT_NPROC, &limit) != 0) ::_exit(cannot_restrict);
    static_cast<void>(::alarm(60));  // instead of joining for ever
    try {
      const bs::Pooled pool{PatternReader{pattern_images()}, 64};
      ::_exit(cannot_restrict);
    } catch (const bs::StorageError& error) {
      ::_exit(error.code() == std::errc::resource_unavailable_try_again ? 0 : 1);
    } catch (...) {
      ::_exit(2);
    }
  }
  expect_ended_well(child);
}
