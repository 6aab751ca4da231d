// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/storage/file_storage.hpp>

#include <block_streamer/storage/mapped_storage.hpp>

#include <storage/pattern_files.hpp>
#include <support/catch.hpp>

#include <signal.h>
#include <sys/time.h>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

/// SIGALRM every millisecond, without SA_RESTART, while it lives.
class AlarmStorm {
 public:
  AlarmStorm() {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    ::sigaction(SIGALRM, &action, &before_);
    set(1000);
  }
  AlarmStorm(const AlarmStorm&) = delete;
  AlarmStorm& operator=(const AlarmStorm&) = delete;
  ~AlarmStorm() {
    set(0);
    ::sigaction(SIGALRM, &before_, nullptr);
  }

 private:
  static void set(long microseconds) {
    const itimerval every{{0, microseconds}, {0, microseconds}};
    ::setitimer(ITIMER_REAL, &every, nullptr);
  }
  struct sigaction before_ {};
};

}  // namespace

TEMPLATE_TEST_CASE("b47_signals_without_restart_change_nothing", "", bs::FileStorage,
                   bs::MappedStorage) {
  const PatternFiles files;
  TestType tier{files.map, 2};
  const AlarmStorm storm;
  for (std::uint32_t round = 0; round < 5; ++round) {
    Reads reads;
    start_random_reads(reads, tier, 40, round);
    reads.check_all(files.images);
  }
}

TEST_CASE("a file source that reads while it is closed elsewhere keeps a descriptor of its own") {
  const auto open_descriptors = [] {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator{"/proc/self/fd"}) {
      ++count;
    }
    return count;
  };
  if (!std::filesystem::exists("/proc/self/fd")) return;
  const PatternFiles files;
  const std::size_t before = open_descriptors();
  {
    bs::FileStorage tier{files.map};
    CHECK(open_descriptors() == before + 3);
  }
  CHECK(open_descriptors() == before);
}
