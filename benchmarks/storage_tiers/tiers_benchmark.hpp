// SPDX-License-Identifier: Apache-2.0
// The scenarios, for any backend.
#pragma once

#include "../support/random_model.hpp"
#include "process_figures.hpp"
#include "read_probe.hpp"
#include "tiers_options.hpp"

#include <block_streamer/io/uring_runtime.hpp>
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/plan/read_plan.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/uring_storage.hpp>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer_benchmarks {

template <class Backend>
class TiersBenchmark {
 public:
  /// @param is_device  the bars hold; elsewhere the program is only tried out.
  TiersBenchmark(Backend backend, bool is_device, const TiersOptions& options, Report& report)
      : backend_{std::move(backend)}, is_device_{is_device}, options_{options}, report_{report} {
    const bs::ModelConfig config = model_of(options.shape, options.layers);
    const std::filesystem::path folder = options.folder;
    if (!std::filesystem::exists(folder / "model.safetensors.index.json")) {
      bs::RamStorage written = random_blocks(config);
      write_checkpoint(folder, written);
    }
    map_ = map_of(folder, config);
    for (const bs::BlockSource& block : map_.blocks()) {
      for (const bs::Segment& s : block.image.segments) needed_ += s.byte_count;
    }
    set_cached(map_.files(), false);
    start_backend();
    baseline_ = resident_bytes();
  }

  void register_all() {
    const std::string when = options_.warm ? "warm" : "cold";
    for (const std::string& tier : tier_names()) {
      register_once(report_, when + "/read/" + tier, [=, this](auto& s) { read(s, tier); });
      register_once(report_, when + "/stream/" + tier, [=, this](auto& s) { stream(s, tier); });
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  static bs::BlockMap map_of(const std::filesystem::path& folder, const bs::ModelConfig& config) {
    std::vector<bs::BlockTensors> blocks;
    for (std::size_t b = 0; b < config.layer_count; ++b) {
      bs::BlockTensors& block = blocks.emplace_back();
      block.prefix = bs::decoder_block_prefix(b);
      for (const auto& tensor : bs::decoder_block_tensors(config)) {
        block.names.push_back(tensor.name);
      }
    }
    return bs::make_block_map(bs::Checkpoint::open(folder), blocks);
  }

  /// What a program that only uses the device costs, before anything of ours.
  void start_backend() {
    bs::HugePages memory{4096};
    const auto registration = backend_.register_host(memory.bytes());
    const auto stream = backend_.make_stream();
    if (!registration) std::printf("note: the device page-locks no memory\n");
  }

  // ---- the tiers

  [[nodiscard]] std::vector<std::string> tier_names() const {
    if (options_.warm) return {"file", "mmap", "io_uring_cached", "file_direct", "io_uring"};
    return {"io_uring", "file_direct", "file", "mmap"};
  }
  /// A tier, and the ring that it needs.
  struct Tier {
    std::unique_ptr<bs::UringRuntime> runtime;
    std::optional<bs::AnyStorage> storage;
    std::string note;
  };
  [[nodiscard]] Tier make(const std::string& name) const {
    Tier tier;
    if (name == "file" || name == "file_direct") {
      const auto access = name == "file" ? bs::FileAccess::cached : bs::FileAccess::direct;
      bs::FileStorage storage{map_, {options_.threads, access}};
      if (name != "file") tier.note = storage.describe();
      tier.storage.emplace(std::move(storage));
    } else if (name == "mmap") {
      tier.storage.emplace(bs::MappedStorage{map_, options_.threads});
    } else {
      bs::UringOptions ring;
      ring.queue_depth = static_cast<std::uint32_t>(options_.depth);
      ring.request_byte_count = static_cast<std::uint32_t>(options_.request_kib * 1024);
      tier.runtime = std::make_unique<bs::UringRuntime>(ring);
      const auto access = name == "io_uring" ? bs::FileAccess::direct : bs::FileAccess::cached;
      bs::UringStorage storage{*tier.runtime, map_, {access, options_.threads}};
      tier.note = storage.describe();
      tier.storage.emplace(std::move(storage));
    }
    return tier;
  }
  [[nodiscard]] static double bar_of(const std::string& name, bool warm) {
    return warm ? 0.90 : name == "io_uring" ? 0.97 : name.starts_with("file_") ? 0.93 : 0;
  }

  // ---- measuring

  struct Run {
    double time_s = 0;
    double cpu_s = 0;
    std::uint64_t drive_bytes = 0;
    std::uint64_t peak_rss = 0;
    std::uint64_t tier_bytes = 0;  ///< what the tier was asked for
  };
  template <class Work>
  [[nodiscard]] Run measure(Work&& work) {
    set_cached(map_.files(), options_.warm);
    Run run;
    const std::uint64_t drive = drive_bytes();
    const double cpu = cpu_seconds();
    const auto begin = Clock::now();
    work(run);
    run.time_s = std::chrono::duration<double>(Clock::now() - begin).count();
    run.cpu_s = cpu_seconds() - cpu;
    run.drive_bytes = drive_bytes() - drive;
    return run;
  }
  static void see_memory(Run& run) { run.peak_rss = std::max(run.peak_rss, resident_bytes()); }

  /// The drive's rate, or out of the page cache the slower of reading and copying to the device.
  [[nodiscard]] double limit(bool with_copy) {
    set_cached(map_.files(), options_.warm);
    const double reading =
        read_rate(map_.files(), !options_.warm, options_.probe_threads, options_.probe_kib * 1024);
    return options_.warm && with_copy ? std::min(reading, copy_rate()) : reading;
  }
  [[nodiscard]] double copy_rate() {
    constexpr std::size_t piece = std::size_t{64} << 20;
    bs::HugePages from{piece};
    std::ranges::fill(from.bytes(), std::byte{1});
    [[maybe_unused]] const auto registration = backend_.register_host(from.bytes());
    const auto to = backend_.allocate_device(piece);
    auto stream = backend_.make_stream();
    auto done = backend_.make_event();
    const auto begin = Clock::now();
    constexpr int times = 32;
    for (int i = 0; i < times; ++i) {
      backend_.copy_async(backend_.bytes(to), from.bytes(), bs::CopyDirection::host_to_device,
                          stream);
    }
    backend_.record(done, stream);
    backend_.synchronize(done);
    return times * static_cast<double>(piece) /
           std::chrono::duration<double>(Clock::now() - begin).count();
  }

  [[nodiscard]] std::size_t chunk_of(const std::string& tier) const {
    if (options_.chunk_kib != 0) return options_.chunk_kib * 1024;
    return tier == "io_uring" ? bs::UringStorage::chunk_byte_count
                              : bs::PipelineOptions{}.chunk_byte_count;
  }

  /// Every chunk of every block into staging memory, as many at once as it holds.
  class Reading {
   public:
    Reading(std::size_t staging, std::size_t chunk, bs::AnyStorage& storage)
        : chunk_{chunk}, storage_{storage}, memory_{std::max(staging, chunk) / chunk * chunk} {
      std::ranges::fill(memory_.bytes(), std::byte{1});
      for (std::size_t i = memory_.size() / chunk_; i-- > 0;) free_.push_back(i);
      places_ = free_.size();
      storage_.prepare(memory_.bytes());
    }
    ~Reading() { storage_.forget(memory_.bytes()); }
    void all(Run& run) {
      for (std::size_t b = 0; b < storage_.block_count(); ++b) {
        const bs::BlockImage& image = storage_.image(bs::block_at(b));
        for (const bs::Chunk& chunk : bs::plan_staged_reads(image, 0, chunk_).chunks) {
          start(bs::block_at(b), chunk.image);
          run.tier_bytes += chunk.image.byte_count;
        }
        see_memory(run);
      }
      std::unique_lock lock{mutex_};
      ended_.wait(lock, [&] { return free_.size() == places_; });
      if (error_) throw std::runtime_error{"a read failed: " + error_.message()};
    }

   private:
    void start(bs::BlockId block, bs::ByteRange range) {
      std::unique_lock lock{mutex_};
      ended_.wait(lock, [&] { return !free_.empty(); });
      const std::size_t place = free_.back();
      free_.pop_back();
      lock.unlock();
      storage_.async_read(block, range, memory_.bytes().subspan(place * chunk_, range.byte_count),
                          [this, place](std::error_code error, std::size_t) {
                            const std::scoped_lock inner{mutex_};
                            if (error) error_ = error;
                            free_.push_back(place);
                            ended_.notify_all();
                          });
    }

    std::size_t chunk_;
    bs::AnyStorage& storage_;
    bs::HugePages memory_;
    std::mutex mutex_;  // guards what follows
    std::condition_variable ended_;
    std::vector<std::size_t> free_;
    std::size_t places_ = 0;
    std::error_code error_;
  };

  void read(benchmark::State& state, const std::string& name) {
    Tier tier = make(name);
    std::vector<Run> runs;
    std::vector<double> limits;
    {
      Reading reading{options_.staging_mib << 20, chunk_of(name), *tier.storage};
      for (std::size_t round = 0; round < options_.rounds; ++round) {
        limits.push_back(limit(false));
        runs.push_back(measure([&](Run& run) { reading.all(run); }));
      }
    }
    tell(state, "read", name, runs, limits, options_.staging_mib << 20, tier.note);
  }

  void stream(benchmark::State& state, const std::string& name) {
    Tier tier = make(name);
    bs::PipelineOptions options;
    options.prefetch_ahead = static_cast<std::uint32_t>(options_.prefetch_ahead);
    options.chunk_byte_count = chunk_of(name);
    options.staging_byte_count = options_.staging_mib << 20;
    options.prefetch_next_pass = false;  // each pass begins cold
    auto compute = backend_.make_stream();
    auto passed = backend_.make_event();
    bs::BlockPipeline<Backend> pipeline{std::move(*tier.storage), backend_, options};
    const bs::VisitOrder order = bs::ascending(0, map_.blocks().size());
    std::vector<Run> runs;
    std::vector<double> limits;
    const auto pass = [&](Run& run) {
      auto visits = pipeline.begin_pass(order, {}, compute);
      while (!visits.done()) {
        const auto lease = visits.acquire();
        see_memory(run);
      }
    };
    for (std::size_t round = 0; round < options_.rounds; ++round) {
      pipeline.close();  // nothing stays resident from the round before
      limits.push_back(limit(true));
      open(pipeline, compute);
      runs.push_back(measure([&](Run& run) {
        const std::uint64_t before = pipeline.statistics().bytes_read;
        pass(run);
        backend_.record(passed, compute);
        backend_.synchronize(passed);
        run.tier_bytes = pipeline.statistics().bytes_read - before;
      }));
    }
    const std::uint64_t slots = is_device_ ? 0 : device_bytes(pipeline);
    tell(state, "stream", name, runs, limits, pipeline.staging_byte_count() + slots, tier.note);
  }
  /// An empty pass takes the memory, which is not what is measured.
  void open(bs::BlockPipeline<Backend>& pipeline, typename Backend::Stream& compute) {
    const auto pass = pipeline.begin_pass({}, {}, compute);
  }
  [[nodiscard]] static std::uint64_t device_bytes(const bs::BlockPipeline<Backend>& pipeline) {
    return pipeline.shape().slot_count * pipeline.shape().slot_byte_count;
  }

  template <class Get>
  [[nodiscard]] static double median_of(const std::vector<Run>& runs, Get get) {
    std::vector<double> values;
    for (const Run& run : runs) values.push_back(get(run));
    return median(values);
  }
  void tell(benchmark::State& state, const std::string& how, const std::string& name,
            const std::vector<Run>& runs, const std::vector<double>& limits, std::uint64_t memory,
            const std::string& note) {
    const auto needed = static_cast<double>(needed_);
    const double time = median_of(runs, [](const Run& r) { return r.time_s; });
    const double share = needed / time / median(limits);
    const double cpu = median_of(runs, [](const Run& r) { return r.cpu_s; }) * 1e3 /
                       (needed / static_cast<double>(1 << 30));
    const double from_drive =
        median_of(runs, [](const Run& r) { return static_cast<double>(r.drive_bytes); }) / needed;
    const double asked =
        median_of(runs, [](const Run& r) { return static_cast<double>(r.tier_bytes); }) / needed;
    std::uint64_t peak = 0;
    for (const Run& run : runs) peak = std::max(peak, run.peak_rss);
    state.SetIterationTime(time);
    state.SetBytesProcessed(static_cast<std::int64_t>(needed_));
    state.counters["share"] = share;
    state.counters["cpu_ms_per_GiB"] = cpu;
    state.counters["drive_bytes_per_needed"] = from_drive;

    const std::string what = (options_.warm ? "warm " : "cold ") + how + ", " + name;
    const double bar = bar_of(name, options_.warm);
    const bool cold = !options_.warm && from_drive < 0.98;
    const bool bound = is_device_ && bar > 0 && (how == "stream" || !options_.warm);
    report_.add(state, {what, needed / time / 1e9, "GB/s", median(limits) / 1e9, share,
                        bound ? std::optional{at_least(bar)} : std::nullopt,
                        cold ? "NOT COLD: the drive delivered too little" : note});
    const bool copies = how == "stream" && !is_device_;  // a thread of ours is the link
    const bool cpu_bound = name == "io_uring" && !options_.warm && !copies;
    report_.add({what + ", processor time",
                 cpu,
                 "ms/GiB",
                 {},
                 {},
                 cpu_bound ? std::optional{at_most(20)} : std::nullopt,
                 copies ? "with the copies to the slots" : ""});
    report_.add({what + ", read / needed", asked, "x", {}, {}, at_most(1.02), ""});
    report_.add({what + ", drive / needed", from_drive, "x", {}, {}, {}, ""});
    const double over = static_cast<double>(peak - std::min(peak, baseline_)) / (1 << 20);
    const double allowed = static_cast<double>(memory) / (1 << 20) + 256;
    report_.add(
        {what + ", RSS over the baseline", over, "MiB", allowed, over / allowed, at_most(1), ""});
  }

  Backend backend_;
  bool is_device_;
  TiersOptions options_;
  Report& report_;
  bs::BlockMap map_;
  std::uint64_t needed_ = 0;
  std::uint64_t baseline_ = 0;  ///< resident once the backend has started
};

}  // namespace block_streamer_benchmarks
