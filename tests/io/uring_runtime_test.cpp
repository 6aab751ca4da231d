// SPDX-License-Identifier: Apache-2.0
// The ring's runtime over scripted answers: what the system does rarely, and in every order.
#include <block_streamer/io/uring_runtime.hpp>

#include <io/scripted_ring.hpp>
#include <support/catch.hpp>
#include <support/safetensors_files.hpp>

#include <sys/resource.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <random>

namespace bs = block_streamer;
using namespace bs::testing_support;

namespace {

using Runtime = bs::BasicUringRuntime<ScriptedRing>;

constexpr std::byte poison{0xAB};

bs::UringOptions options_of(std::uint32_t depth, std::uint32_t request) {
  bs::UringOptions options;
  options.queue_depth = depth;
  options.request_byte_count = request;
  return options;
}

/// A file of position-dependent bytes, open, and reads of it.
class Scene {
 public:
  explicit Scene(std::size_t size) : bytes_{support::pattern_bytes("ring", size)} {
    support::write_text(folder_ / "f", bytes_);
    file_ = bs::File::open(folder_ / "f");
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  struct Read {
    std::unique_ptr<std::byte[], bs::detail::FreeAligned> memory;
    bs::FileRead read;
    std::error_code error;
    std::size_t byte_count = 0;
    std::atomic<int> calls = 0;
  };

  template <class Ring>
  Read& start(bs::BasicUringRuntime<Ring>& runtime, std::uint64_t offset, std::size_t size,
              std::uint32_t alignment) {
    const std::scoped_lock lock{mutex_};
    Read& read = reads_.emplace_back();
    const std::size_t room = (size + 8191) / 4096 * 4096;
    read.memory.reset(static_cast<std::byte*>(std::aligned_alloc(4096, room)));
    std::fill_n(read.memory.get(), room, poison);
    const std::uint64_t there = bytes_.size() - std::min<std::uint64_t>(bytes_.size(), offset);
    read.read = {file_.native_handle(),
                 offset,
                 {read.memory.get(), size},
                 std::min<std::uint64_t>(size, there),
                 alignment};
    runtime.async_read(
        read.read,
        [&read](std::error_code error, std::size_t n) {
          read.error = error;
          read.byte_count = n;
          ++read.calls;
        },
        &group_);
    return read;
  }
  void wait() { group_.wait(); }
  /// What the file has, zeros beyond.
  [[nodiscard]] bool holds(const Read& read) const {
    for (std::size_t i = 0; i < read.read.out.size(); ++i) {
      const std::uint64_t at = read.read.offset + i;
      const auto expected = at < bytes_.size() ? static_cast<std::byte>(bytes_[at]) : std::byte{0};
      if (read.read.out[i] != expected) return false;
    }
    return true;
  }
  void check_all() {
    wait();
    for (const Read& read : reads_) {
      REQUIRE(read.calls == 1);
      REQUIRE(read.error == std::error_code{});
      REQUIRE(read.byte_count == read.read.out.size());
      REQUIRE(holds(read));
    }
  }
  [[nodiscard]] std::deque<Read>& reads() { return reads_; }
  [[nodiscard]] std::filesystem::path path() const { return folder_ / "f"; }

 private:
  support::TempFolder folder_;
  std::string bytes_;
  bs::File file_;
  std::mutex mutex_;
  std::deque<Read> reads_;
  bs::ReadGroup group_;
};

void start_many(Scene& scene, Runtime& runtime, std::uint32_t alignment, std::uint32_t seed = 1) {
  std::mt19937 random{seed};
  for (int i = 0; i < 24; ++i) {
    const std::uint64_t offset = random() % 200 * alignment;
    const std::size_t size = (1 + random() % 60) * alignment;
    scene.start(runtime, offset, size, alignment);
  }
}

}  // namespace

TEST_CASE("b39 b40 b41 short answers of any length are gone on from at whole blocks") {
  for (const std::uint64_t cut : {1U, 511U, 512U, 513U, 4095U, 4096U, 8192U}) {
    for (const std::uint32_t alignment : {1U, 512U, 4096U}) {
      Scene scene{100'003};
      RingScript script;
      script.judge = [cut](std::uint64_t n, const bs::RingRead&) {
        return n % 3 == 2 ? Verdict{} : Verdict{0, cut};
      };
      {
        Runtime runtime{options_of(4, 16'384), ScriptedRing::opener(script)};
        start_many(scene, runtime, alignment);
        scene.check_all();
      }
      for (const bs::RingRead& read : script.seen) {
        REQUIRE(read.offset % alignment == 0);
        REQUIRE(read.out.size() % alignment == 0);
        REQUIRE(reinterpret_cast<std::uintptr_t>(read.out.data()) % alignment == 0);
        REQUIRE(read.out.size() <= 16'384);
      }
    }
  }
}

TEST_CASE("a device that never gives a whole block ends in an error, not in a loop") {
  Scene scene{100'003};
  RingScript script;
  script.judge = [](std::uint64_t, const bs::RingRead&) { return Verdict{0, 511}; };
  Runtime runtime{options_of(4, 16'384), ScriptedRing::opener(script)};
  auto& read = scene.start(runtime, 0, 4096, 512);
  scene.wait();
  CHECK(read.error == std::errc::io_error);
  CHECK(script.requests < 100);
}

TEST_CASE("b44 an error at any request is that read's, once, and the others' bytes are right") {
  std::uint64_t total = 0;
  for (std::uint64_t failing = 0; failing == 0 || failing < total; ++failing) {
    Scene scene{100'003};
    RingScript script;
    script.judge = [failing](std::uint64_t n, const bs::RingRead&) {
      return n == failing ? Verdict{-EIO} : Verdict{};
    };
    Runtime runtime{options_of(3, 8192), ScriptedRing::opener(script)};
    for (std::uint64_t i = 0; i < 6; ++i) scene.start(runtime, i * 16'384, 20'480, 512);
    scene.wait();
    std::size_t failed = 0;
    for (const Scene::Read& read : scene.reads()) {
      REQUIRE(read.calls == 1);
      if (read.error) {
        ++failed;
        REQUIRE(read.error == std::errc::io_error);
        REQUIRE(read.byte_count == 0);
      } else {
        REQUIRE(scene.holds(read));
      }
    }
    REQUIRE(failed == 1);
    if (failing == 0) {
      Scene whole{100'003};
      RingScript count;
      Runtime counting{options_of(3, 8192), ScriptedRing::opener(count)};
      for (std::uint64_t i = 0; i < 6; ++i) whole.start(counting, i * 16'384, 20'480, 512);
      whole.check_all();
      total = count.requests;
      REQUIRE(total == 18);
    }
    // The runtime goes on after it.
    auto& after = scene.start(runtime, 0, 40'960, 512);
    scene.wait();
    REQUIRE((after.error == std::error_code{} && scene.holds(after)));
  }
}

TEST_CASE("b47 interrupted and refused-for-now requests are repeated, not for ever") {
  for (const int code : {-EINTR, -EAGAIN}) {
    Scene scene{100'003};
    RingScript script;
    script.judge = [code](std::uint64_t n, const bs::RingRead&) {
      return n % 2 == 0 ? Verdict{code} : Verdict{};
    };
    {
      Runtime runtime{options_of(4, 8192), ScriptedRing::opener(script)};
      start_many(scene, runtime, 512);
      scene.check_all();
    }
    script.judge = [code](std::uint64_t, const bs::RingRead&) { return Verdict{code}; };
    Runtime runtime{options_of(4, 8192), ScriptedRing::opener(script)};
    auto& read = scene.start(runtime, 0, 4096, 512);
    scene.wait();
    CHECK(read.error == std::error_code{-code, std::generic_category()});
  }
}

TEST_CASE("b45 answers in another order than the requests reach their own reads") {
  Scene scene{1'000'003};
  RingScript script;
  script.newest_first = true;
  Runtime runtime{options_of(64, 4096), ScriptedRing::opener(script)};
  for (std::uint32_t seed = 0; seed < 4; ++seed) start_many(scene, runtime, 512, seed);
  scene.check_all();
}

TEST_CASE(
    "b48 b49 any depth and any queue take 500 small reads, never more at once than the depth") {
  for (const std::uint32_t depth : {1U, 2U, 4U, 8U}) {
    for (const std::uint32_t capacity : {1U, 3U, 1000U}) {
      Scene scene{1'000'003};
      RingScript script;
      script.queue_capacity = capacity;
      {
        Runtime runtime{options_of(depth, 4096), ScriptedRing::opener(script)};
        for (std::uint64_t i = 0; i < 500; ++i) scene.start(runtime, i * 1536, 1536, 512);
        scene.check_all();
      }
      CHECK(script.most_in_flight <= depth);
    }
  }
}

TEST_CASE("b54 the end of the runtime waits for what is in the ring and for what waits outside") {
  Scene scene{100'003};
  RingScript script;
  script.held = true;
  auto runtime = std::make_unique<Runtime>(options_of(4, 4096), ScriptedRing::opener(script));
  for (std::uint64_t i = 0; i < 32; ++i) scene.start(*runtime, i * 1024, 8192, 512);
  script.wait_for_requests(4);
  std::atomic<bool> ended{false};
  std::thread destroyer{[&] {
    runtime.reset();
    ended = true;
  }};
  CHECK_FALSE(ended);
  for (const Scene::Read& read : scene.reads()) CHECK(read.calls == 0);
  script.let_go();
  destroyer.join();
  scene.check_all();
}

TEST_CASE("a ring that stops taking requests loses none: they are read by its thread") {
  for (const std::uint64_t from : {0U, 1U, 3U, 7U}) {
    Scene scene{100'003};
    RingScript script;
    script.submit = [from](std::uint64_t n) { return n >= from ? -EPERM : 0; };
    {
      Runtime runtime{options_of(4, 8192), ScriptedRing::opener(script)};
      start_many(scene, runtime, 512);
      scene.check_all();
    }
  }
}

TEST_CASE("submissions that fail for a while are repeated") {
  Scene scene{100'003};
  RingScript script;
  script.submit = [](std::uint64_t n) { return n % 3 == 0 ? -EINTR : n % 3 == 1 ? -EBUSY : 0; };
  Runtime runtime{options_of(4, 8192), ScriptedRing::opener(script)};
  start_many(scene, runtime, 512);
  scene.check_all();
}

TEST_CASE("pinned memory is used where it holds the whole request, until it is forgotten") {
  Scene scene{100'003};
  RingScript script;
  Runtime runtime{options_of(4, 8192), ScriptedRing::opener(script)};
  auto& first = scene.start(runtime, 0, 16'384, 512);
  scene.wait();
  CHECK(script.fixed_requests == 0);
  runtime.pin(first.read.out);
  CHECK(runtime.report().fixed_byte_count == 16'384);
  std::atomic<int> ended{0};
  const auto again = [&] {
    std::ranges::fill(first.read.out, poison);
    const int before = ended;
    runtime.async_read(first.read, [&](std::error_code error, std::size_t) { ended += !error; });
    while (ended == before) std::this_thread::yield();
    CHECK(scene.holds(first));
  };
  again();
  CHECK(script.fixed_requests == 2);
  runtime.unpin(first.read.out);
  CHECK(runtime.report().fixed_byte_count == 0);
  again();
  CHECK(script.fixed_requests == 2);
}

TEST_CASE(
    "b59 a read into pinned memory that the system refuses is repeated plainly, and it is told") {
  for (const int code : {-EFAULT, -EINVAL, -EOPNOTSUPP}) {
    Scene scene{100'003};
    RingScript script;
    script.judge = [code](std::uint64_t, const bs::RingRead& read) {
      return read.buffer ? Verdict{code} : Verdict{};
    };
    Runtime runtime{options_of(4, 8192), ScriptedRing::opener(script)};
    auto& first = scene.start(runtime, 0, 16'384, 512);
    scene.wait();
    runtime.pin(first.read.out);
    std::atomic<int> ended{0};
    std::ranges::fill(first.read.out, poison);
    runtime.async_read(first.read, [&](std::error_code error, std::size_t) { ended += !error; });
    while (ended == 0) std::this_thread::yield();
    CHECK(scene.holds(first));
    auto& last = scene.start(runtime, 0, 512, 512);  // the report follows the next piece of work
    scene.wait();
    CHECK(last.error == std::error_code{});
    CHECK_FALSE(runtime.report().fixed_buffers_refusal.empty());
  }
}

TEST_CASE("memory that cannot be pinned is read into plainly, and it is told why") {
  Scene scene{100'003};
  RingScript script;
  script.pin = false;
  Runtime runtime{options_of(4, 8192), ScriptedRing::opener(script)};
  auto& read = scene.start(runtime, 0, 16'384, 512);
  scene.wait();
  runtime.pin(read.read.out);
  CHECK(runtime.report().fixed_byte_count == 0);
  (void)scene.start(runtime, 0, 512, 512);
  scene.check_all();
  CHECK(runtime.report().fixed_buffers_refusal.find("ulimit -l") != std::string::npos);
  CHECK(script.fixed_requests == 0);
}

TEST_CASE("b61 a direct read refused after the open is repeated through the page cache") {
  Scene scene{100'003};
  RingScript script;
  bs::File file = bs::File::open(scene.path());
  const bs::DirectIo direct = bs::enable_direct_io(file);
  if (!direct.works()) {
    WARN("skipped: " << direct.refusal);
    return;
  }
  script.judge = [](std::uint64_t, const bs::RingRead& read) {
    return bs::detail::is_direct(read.descriptor) ? Verdict{-EINVAL} : Verdict{};
  };
  Runtime runtime{options_of(4, 8192), ScriptedRing::opener(script)};
  auto& read = scene.start(runtime, 0, 65'536, 512);
  scene.wait();
  runtime.pin(read.read.out);
  std::ranges::fill(read.read.out, poison);
  bs::FileRead from_direct = read.read;
  from_direct.descriptor = file.native_handle();
  std::atomic<int> ended{0};
  runtime.async_read(from_direct,
                     [&](std::error_code error, std::size_t) { ended += error ? 2 : 1; });
  while (ended == 0) std::this_thread::yield();
  CHECK(ended == 1);
  CHECK(scene.holds(read));
  CHECK_FALSE(bs::detail::is_direct(file.native_handle()));
  (void)scene.start(runtime, 0, 512, 512);
  scene.wait();
  CHECK(runtime.report().fixed_buffers_refusal.empty());  // the memory was not to blame
}

TEST_CASE("options out of range are the caller's error") {
  CHECK_THROWS_AS(bs::UringRuntime{options_of(0, 8192)}, bs::ContractViolation);
  CHECK_THROWS_AS(bs::UringRuntime{options_of(4, 1)}, bs::ContractViolation);
}

TEST_CASE("the system's ring reads what is there, at any depth and size of request") {
  for (const std::uint32_t depth : {1U, 2U, 16U}) {
    for (const std::uint32_t request : {4096U, 65'536U}) {
      Scene scene{1'000'003};
      bs::UringRuntime runtime{options_of(depth, request)};
      if (!runtime.running()) {
        WARN("skipped: " << runtime.report().refusal);
        return;
      }
      CHECK_FALSE(runtime.report().setup.empty());
      for (std::uint64_t i = 0; i < 200; ++i) scene.start(runtime, i * 5000, 12'345, 1);
      scene.check_all();
    }
  }
}

TEST_CASE("b48 10,000 small reads at once go through a ring of two") {
  Scene scene{1'000'003};
  bs::UringRuntime runtime{options_of(2, 4096)};
  if (!runtime.running()) return;
  for (std::uint64_t i = 0; i < 10'000; ++i) scene.start(runtime, i * 90, 90, 1);
  scene.check_all();
}

TEST_CASE("b57 b59 pinned reads into inner offsets of the memory, from any offset of the file") {
  bs::UringRuntime runtime{options_of(4, 65'536)};
  if (!runtime.running()) return;
  Scene scene{200'003};
  auto& whole = scene.start(runtime, 0, 131'072, 1);
  scene.wait();
  runtime.pin(whole.read.out);
  if (runtime.report().fixed_byte_count == 0) {
    WARN("not pinned: " << runtime.report().fixed_buffers_refusal);
  }
  std::ranges::fill(whole.read.out, poison);
  std::atomic<int> ended{0};
  for (const std::size_t at : {0U, 4096U, 8192U, 12'288U}) {
    bs::FileRead part = whole.read;
    part.offset = 100'000 - at;  // neither the place in the memory nor in any order
    part.out = whole.read.out.subspan(at, 4096);
    part.needed = 4096;
    runtime.async_read(part, [&](std::error_code error, std::size_t) { ended += error ? 100 : 1; });
  }
  while (ended < 4) std::this_thread::yield();
  CHECK(ended == 4);
  const std::string expected = support::pattern_bytes("ring", 200'003);
  for (const std::size_t at : {0U, 4096U, 8192U, 12'288U}) {
    CHECK(std::ranges::equal(whole.read.out.subspan(at, 4096),
                             std::as_bytes(std::span{expected}).subspan(100'000 - at, 4096)));
  }
  runtime.unpin(whole.read.out);
}

TEST_CASE("20 runtimes one after another leave no descriptor open and no memory pinned") {
  const auto open_descriptors = [] {
    return std::distance(std::filesystem::directory_iterator{"/proc/self/fd"}, {});
  };
  const auto before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    bs::UringRuntime runtime;
    std::vector<std::byte> memory(1U << 20);
    runtime.pin(memory);
  }
  CHECK(open_descriptors() == before);
}
