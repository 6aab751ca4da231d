// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/os/limits.hpp>

#include <block_streamer/os/cgroup_memory.hpp>

#include <support/safetensors_files.hpp>

#include <support/catch.hpp>

namespace bs = block_streamer;
namespace fs = std::filesystem;

namespace {
void put(const fs::path& path, std::string_view text) {
  fs::create_directories(path.parent_path());
  support::write_text(path, text);
}
constexpr std::string_view meminfo =
    "MemTotal:       16000 kB\nMemFree:  10 kB\nMemAvailable:    8000 kB\nSwapTotal: 0 kB\n";
}  // namespace

TEST_CASE("available memory is read in kibibytes, by its exact key") {
  CHECK(bs::parse_available_memory(meminfo) == 8000U * 1024);
  CHECK(bs::parse_available_memory("MemAvailable: 7 kB") == 7U * 1024);
  CHECK_FALSE(bs::parse_available_memory("MemTotal: 7 kB\n").has_value());
  CHECK_FALSE(bs::parse_available_memory("MemAvailable: kB\n").has_value());
  CHECK_FALSE(bs::parse_available_memory("XMemAvailable: 7 kB\nMemAvailableX: 8 kB").has_value());
  CHECK_FALSE(bs::parse_available_memory("").has_value());
}

TEST_CASE("version 2 groups: limit, usage without droppable cache, unlimited") {
  const support::TempFolder folder;
  put(folder / "memory.max", "1000000\n");
  put(folder / "memory.current", "600000\n");
  put(folder / "memory.stat", "anon 5\ninactive_file 100000\nactive_file 7\n");
  const auto memory = bs::read_cgroup_memory(folder.path());
  REQUIRE(memory);
  CHECK(memory->limit == 1'000'000U);
  CHECK(memory->usage == 500'000U);
  put(folder / "memory.max", "max\n");
  CHECK_FALSE(bs::read_cgroup_memory(folder.path())->limit.has_value());
}

TEST_CASE("version 1 groups: a huge limit is none") {
  const support::TempFolder folder;
  CHECK_FALSE(bs::read_cgroup_memory(folder.path()).has_value());
  put(folder / "memory.limit_in_bytes", "9223372036854771712\n");
  put(folder / "memory.usage_in_bytes", "300\n");
  CHECK_FALSE(bs::read_cgroup_memory(folder.path())->limit.has_value());
  put(folder / "memory.limit_in_bytes", "4096\n");
  CHECK(bs::read_cgroup_memory(folder.path())->limit == 4096U);
  CHECK(bs::read_cgroup_memory(folder.path())->usage == 300U);
}

TEST_CASE("the tightest of the group and its ancestors counts") {
  const support::TempFolder root;
  put(root / "proc/meminfo", meminfo);
  put(root / "proc/self/cgroup", "0::/outer/inner\n");
  CHECK(bs::available_memory(root.path()) == 8000U * 1024);
  put(root / "sys/fs/cgroup/outer/memory.max", "5000000");
  put(root / "sys/fs/cgroup/outer/memory.current", "1000000");
  put(root / "sys/fs/cgroup/outer/inner/memory.max", "max");
  CHECK(bs::available_memory(root.path()) == 4'000'000U);
  put(root / "sys/fs/cgroup/outer/inner/memory.max", "3000000");
  put(root / "sys/fs/cgroup/outer/inner/memory.current", "2900000");
  CHECK(bs::available_memory(root.path()) == 100'000U);
  put(root / "sys/fs/cgroup/outer/inner/memory.current", "3100000");
  CHECK(bs::available_memory(root.path()) == 0U);
}

TEST_CASE("version 1 hierarchies are found by their controller") {
  const support::TempFolder root;
  put(root / "proc/meminfo", meminfo);
  put(root / "proc/self/cgroup", "12:cpuset:/x\n5:cpu,memory:/group\n0::/\n");
  put(root / "sys/fs/cgroup/memory/group/memory.limit_in_bytes", "70000");
  put(root / "sys/fs/cgroup/memory/group/memory.usage_in_bytes", "1");
  CHECK(bs::available_memory(root.path()) == 69'999U);
}

TEST_CASE("a container sees its own group at the root") {
  const support::TempFolder root;
  put(root / "proc/self/cgroup", "0::/docker/0123\n");
  put(root / "sys/fs/cgroup/memory.max", "1234");
  CHECK(bs::available_memory(root.path()) == 1234U);
}

TEST_CASE("garbage and missing files mean that nothing is known") {
  const support::TempFolder root;
  CHECK_FALSE(bs::available_memory(root.path()).has_value());
  put(root / "proc/self/cgroup", "nonsense\n::::\n:\n");
  put(root / "proc/meminfo", "\0\0\0");
  CHECK_FALSE(bs::available_memory(root.path()).has_value());
}

TEST_CASE("this machine has memory") {
  CHECK(bs::available_memory().value_or(1) > 0);
}
