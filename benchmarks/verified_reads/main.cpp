// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/checkpoint/checksums.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/checkpoint/shard_conversion.hpp>
#include <block_streamer/os/huge_pages.hpp>
#include <block_streamer/plan/read_plan.hpp>
#include <block_streamer/storage/decorators/verified_storage.hpp>
#include <block_streamer/storage/file_storage.hpp>

#include "../support/main.hpp"

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <random>
#include <stdexcept>

#include <stdlib.h>
#include <sys/resource.h>

namespace bs = block_streamer;
namespace fs = std::filesystem;
using namespace block_streamer_benchmarks;

namespace {

constexpr std::uint64_t chunk_byte_count = std::uint64_t{4} << 20;
constexpr std::size_t reads_in_flight = 8;

struct Size {
  std::size_t blocks;
  std::size_t block_mib;
  std::size_t rounds;
};

/// A checkpoint of blocks of nine tensors each, as it came and packed.
class Models {
 public:
  Models(const fs::path& parent, const Size& size) {
    std::string name = (parent / "bs-verified-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error{"cannot write in " + name};
    folder_ = name;
    fs::create_directories(folder_ / "original");
    write(size);
    const auto original = bs::Checkpoint::open(folder_ / "original");
    const auto manifest = bs::sum_checkpoint(original, blocks_, {});
    bs::atomic_replace(folder_ / "original" / bs::manifest_file_name,
                       std::string_view{bs::format_shard_manifest(manifest)});
    bs::convert_to_shards(original, blocks_, {}, folder_ / "packed");
  }
  Models(const Models&) = delete;
  Models& operator=(const Models&) = delete;
  ~Models() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  [[nodiscard]] bs::AnyStorage tier(const std::string& which, bool verified) const {
    const auto checkpoint = bs::Checkpoint::open(folder_ / which);
    const bs::BlockMap map = bs::make_block_map(checkpoint, blocks_);
    if (!verified) return bs::FileStorage{map};
    return bs::VerifiedStorage{bs::FileStorage{map},
                               bs::make_image_sums(map, *checkpoint.manifest(), which)};
  }

 private:
  void write(const Size& size) {
    // No size is a multiple of 256: every tensor of the original is a segment of its own.
    const std::uint64_t large = (size.block_mib << 20) / 7 / 2 * 2 + 2;
    std::vector<std::byte> bytes(large);
    std::mt19937_64 random{1};
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    std::vector<bs::TensorBytes> tensors;
    for (std::size_t b = 0; b < size.blocks; ++b) {
      bs::BlockTensors& block = blocks_.emplace_back();
      block.prefix = "b" + std::to_string(100 + b) + ".";
      for (int t = 0; t < 9; ++t) {
        const std::uint64_t count = t < 7 ? large : 1152;
        block.names.push_back("t" + std::to_string(t));
        tensors.push_back({{block.prefix + block.names.back(), bs::DType::bf16, {count / 2}},
                           std::span{bytes}.first(count)});
      }
    }
    bs::write_safetensors(folder_ / "original" / "model.safetensors", tensors);
  }

  fs::path folder_;
  std::vector<bs::BlockTensors> blocks_;
};

struct Cost {
  double gb_per_s;
  double cpu_ms_per_gib;  ///< of all threads
};

double cpu_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

/// Reads every block once; the cost is per byte that a slot needs.
Cost read_all(bs::AnyStorage& tier, bool by_tensor) {
  std::vector<bs::HugePages> buffers;
  std::mutex mutex;  // guards what follows
  std::condition_variable ended;
  std::vector<std::byte*> free;
  std::error_code failure;
  for (std::size_t i = 0; i < reads_in_flight; ++i) {
    buffers.emplace_back(chunk_byte_count);
    free.push_back(buffers.back().bytes().data());
  }
  std::uint64_t needed = 0;
  const double cpu_before = cpu_seconds();
  const auto started = std::chrono::steady_clock::now();
  for (std::size_t b = 0; b < tier.block_count(); ++b) {
    const bs::BlockImage& image = tier.image(bs::block_at(b));
    const bs::ReadPlan plan = by_tensor ? bs::plan_direct_reads(image, 0, chunk_byte_count)
                                        : bs::plan_staged_reads(image, 0, chunk_byte_count);
    needed += plan.needed_byte_count;
    for (const bs::Chunk& chunk : plan.chunks) {
      std::unique_lock lock{mutex};
      ended.wait(lock, [&] { return !free.empty(); });
      std::byte* const buffer = free.back();
      free.pop_back();
      lock.unlock();
      tier.async_read(bs::block_at(b), chunk.image,
                      {buffer, static_cast<std::size_t>(chunk.image.byte_count)},
                      [&, buffer](std::error_code error, std::size_t) {
                        const std::scoped_lock end{mutex};
                        if (error) failure = error;
                        free.push_back(buffer);
                        ended.notify_all();
                      });
    }
  }
  std::unique_lock lock{mutex};
  ended.wait(lock, [&] { return free.size() == reads_in_flight; });
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - started;
  if (failure) throw std::runtime_error{"a read failed: " + failure.message()};
  return {static_cast<double>(needed) / 1e9 / spent.count(),
          (cpu_seconds() - cpu_before) * 1e3 / (static_cast<double>(needed) / 0x1p30)};
}

void compare(benchmark::State& state, Report& report, const Models& models, const Size& size,
             const std::string& which, bool by_tensor) {
  bs::AnyStorage plain = models.tier(which, false);
  bs::AnyStorage verified = models.tier(which, true);
  std::vector<double> without, with, ratios, cpu_without, cpu_with;
  for (std::size_t round = 0; round < size.rounds; ++round) {
    const Cost a = read_all(plain, by_tensor);
    const Cost b = read_all(verified, by_tensor);
    without.push_back(a.gb_per_s);
    with.push_back(b.gb_per_s);
    ratios.push_back(b.gb_per_s / a.gb_per_s);
    cpu_without.push_back(a.cpu_ms_per_gib);
    cpu_with.push_back(b.cpu_ms_per_gib);
  }
  state.SetIterationTime(1 / median(with));
  const std::string what = which + (by_tensor ? ", tensor by tensor" : ", block by block");
  report.add(state, {what, median(with), "GB/s", median(without), median(ratios), {}, {}});
  report.add({what + ", processor", median(cpu_with), "ms/GiB", median(cpu_without), {}, {}, {}});
}

/// One core's sums over 4 MiB that lie in its cache as far as they fit.
template <class Kernel>
void sum(benchmark::State& state, Report& report, const std::string& what, Kernel kernel) {
  const std::vector<std::byte> bytes(chunk_byte_count, std::byte{7});
  std::vector<double> rates;
  std::uint32_t crc = 0;
  for (int round = 0; round < 9; ++round) {
    const auto started = std::chrono::steady_clock::now();
    for (int i = 0; i < 8; ++i) crc = kernel(std::span{bytes}, crc);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - started;
    rates.push_back(8 * static_cast<double>(chunk_byte_count) / 1e9 / spent.count());
  }
  benchmark::DoNotOptimize(crc);
  state.SetIterationTime(1 / median(rates));
  report.add(state, {what, median(rates), "GB/s", {}, {}, {}, {}});
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments{argc, argv};
  const fs::path folder = arguments.text("--folder", fs::temp_directory_path().string());
  const Size size{arguments.number("--blocks", 24), arguments.number("--block-mib", 16),
                  arguments.number("--rounds", 9)};
  if (!initialize_benchmark(arguments)) return 2;
  Report report;
  register_once(report, "crc32c/chosen", [&](benchmark::State& state) {
    sum(state, report, "crc32c, one core",
        [](auto bytes, std::uint32_t crc) { return bs::crc32c(bytes, crc); });
  });
  register_once(report, "crc32c/software", [&](benchmark::State& state) {
    sum(state, report, "crc32c without SSE 4.2, one core",
        [](auto bytes, std::uint32_t crc) { return bs::detail::crc32c_software(bytes, crc); });
  });
  const Models models{folder, size};
  for (const std::string which : {"packed", "original"}) {
    for (const bool by_tensor : {false, true}) {
      register_once(report, "verified/" + which + (by_tensor ? "/by_tensor" : "/by_block"),
                    [&, which, by_tensor](benchmark::State& state) {
                      compare(state, report, models, size, which, by_tensor);
                    });
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  report.print();
  return 0;
}
