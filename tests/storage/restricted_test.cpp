// SPDX-License-Identifier: Apache-2.0
// What storage does where the system refuses io_uring, or memory to pin: this program, started
// again under a filter of system calls or a limit. The hidden cases are what then runs.
#include <block_streamer/storage/pooled.hpp>
#include <block_streamer/storage/uring_storage.hpp>

#include <storage/every_tier.hpp>
#include <storage/pattern_files.hpp>
#include <storage/pattern_reader.hpp>
#include <support/catch.hpp>
#include <support/restricted.hpp>

#include <cerrno>
#include <string>

namespace bs = block_streamer;
using namespace bs::testing_support;
using support::cannot_restrict;

namespace {

void check_described(const std::string& text) {
  INFO(text);
  CHECK(text.find(support::expectation()) != std::string::npos);
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
TEST_CASE("b52 b53 b56 a ring that is forbidden in any way is a thread pool, with the reason") {
  const auto under = [](long call, int error, const char* expected) {
    support::run_restricted("restricted: no ring", expected,
                            [=] { return support::forbid(call, error); });
  };
  under(__NR_io_uring_setup, EPERM, "Operation not permitted");
  under(__NR_io_uring_setup, ENOSYS, "Function not implemented");
  under(__NR_io_uring_setup, ENOMEM, "Cannot allocate memory");
  under(__NR_io_uring_setup, EINVAL, "the kernel is too old");
  under(__NR_io_uring_enter, EINVAL, "Invalid argument");
  under(__NR_io_uring_enter, EPERM, "Operation not permitted");
  under(__NR_io_uring_register, EPERM, "Operation not permitted");
}

TEST_CASE("b51 with 64 KiB of memory to lock, reads are plain and right") {
  support::run_restricted("restricted: little memory to pin", "plain buffers",
                          [] { return support::limit_locked_memory(65'536); });
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
  support::expect_ended_well(child);
}
