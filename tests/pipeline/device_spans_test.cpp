// SPDX-License-Identifier: Apache-2.0
// Device time on the host's clock, by a backend whose device is late on purpose.
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/pipeline/span_trace.hpp>

#include <support/catch.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "pipeline_run.hpp"

namespace bs = block_streamer;
using bs::Nanoseconds;
using namespace std::chrono_literals;

namespace {

/// The host's memory and order, and a clock of the device that runs a fixed step per record.
class LateBackend : public bs::HostBackend {
 public:
  explicit LateBackend(bs::HostMode mode = bs::HostMode::attached, Nanoseconds step = 1ms)
      : bs::HostBackend{mode}, clock_{std::make_shared<Clock>()} {
    clock_->step = step;
  }
  using Stream = bs::HostBackend::Stream;
  struct Event : bs::HostBackend::Event {
    explicit Event(bs::HostBackend::Event inner) : bs::HostBackend::Event{std::move(inner)} {}
    std::uint64_t number = 0;  ///< of its latest record
  };

  [[nodiscard]] Event make_event() { return Event{bs::HostBackend::make_event()}; }
  [[nodiscard]] Event make_timing_event() {
    ++clock_->made;
    return make_event();
  }
  void record(Event& event, Stream& stream) {
    event.number = ++clock_->records;
    bs::HostBackend::record(event, stream);
  }
  [[nodiscard]] bool query(Event& event) {
    if (clock_->slow_queries > 0) {
      --clock_->slow_queries;
      std::this_thread::sleep_for(20ms);
    }
    return event.number <= clock_->passed && bs::HostBackend::query(event);
  }
  void synchronize(Event& event) {
    ++clock_->waits;
    bs::HostBackend::synchronize(event);
  }
  [[nodiscard]] Nanoseconds elapsed(Event& begin, Event& end) {
    if (clock_->anchor == 0) clock_->anchor = begin.number;
    clock_->longest = std::max(clock_->longest, clock_->time(begin, end));
    return clock_->time(begin, end);
  }

  struct Clock {
    Nanoseconds step{};
    std::uint64_t records = 0, made = 0, waits = 0;
    int slow_queries = 0;               ///< so many from now on take long
    std::uint64_t anchor = 0;           ///< the record that spans were first measured from
    std::uint64_t passed = UINT64_MAX;  ///< records that the device is past
    Nanoseconds longest{};              ///< between two events that were compared
    [[nodiscard]] Nanoseconds time(const Event& begin, const Event& end) const {
      return step * static_cast<std::int64_t>(end.number - begin.number);
    }
  };
  [[nodiscard]] Clock& clock() noexcept { return *clock_; }

 private:
  std::shared_ptr<Clock> clock_;
};
static_assert(bs::device_timing_backend<LateBackend>);
static_assert(!bs::device_timing_backend<bs::HostBackend>);

struct Sink {
  std::mutex mutex;
  std::vector<bs::TraceEvent> events;
  bool on = true;
  [[nodiscard]] bool enabled() const noexcept { return on; }
  void record(const bs::TraceEvent& event) noexcept {
    const std::lock_guard lock{mutex};
    events.push_back(event);
  }
  [[nodiscard]] std::vector<bs::TraceEvent> of(bs::Lane lane) {
    std::vector<bs::TraceEvent> some;
    for (const auto& event : events)
      if (event.lane == lane) some.push_back(event);
    return some;
  }
};

using Trace = bs::SpanTrace<LateBackend>;

void span(Trace& trace, LateBackend::Stream& stream, std::uint32_t block) {
  auto begin = trace.begin_on(stream);
  trace.end_on("compute", bs::Lane::compute, {bs::block_at(block)}, std::move(begin), 7, stream);
}

}  // namespace

TEST_CASE("spans of the device are on the host's clock, in its own lengths") {
  LateBackend backend;
  Sink sink;
  Trace trace{backend, sink};
  auto stream = backend.make_stream();
  const Nanoseconds before = backend.now();
  for (std::uint32_t i = 0; i < 3; ++i) span(trace, stream, i);
  const Nanoseconds after = backend.now();
  trace.drain();
  const auto spans = sink.of(bs::Lane::compute);
  REQUIRE(spans.size() == 3);
  // The anchor is one of the eight records before the spans', a step of the device each.
  CHECK(spans[0].begin >= before + 1ms);
  CHECK(spans[0].begin <= after + 8ms);
  for (std::uint32_t i = 0; i < 3; ++i) {
    CHECK(spans[i].begin == spans[0].begin + 2ms * i);
    CHECK(spans[i].end - spans[i].begin == 1ms);
    CHECK(spans[i].part.block == bs::block_at(i));
    CHECK(spans[i].byte_count == 7);
  }
  CHECK(sink.of(bs::Lane::caller).size() == 3);  // what the host did meanwhile
}

TEST_CASE("a moment that the host saw late is no anchor") {
  LateBackend backend{bs::HostMode::attached, 1ns};
  Sink sink;
  Trace trace{backend, sink};
  auto stream = backend.make_stream();
  backend.clock().slow_queries = 3;  // the driver is busy with something else
  const Nanoseconds before = backend.now();
  span(trace, stream, 0);
  trace.drain();
  CHECK(sink.of(bs::Lane::compute)[0].begin >= before + 3 * 20ms);
  CHECK(backend.clock().anchor >= 4);
}

TEST_CASE("spans wait for the device, not the host for them; events are used again") {
  LateBackend backend;
  Sink sink;
  Trace trace{backend, sink};
  auto stream = backend.make_stream();
  span(trace, stream, 0);
  backend.clock().passed = backend.clock().records;
  for (std::uint32_t i = 1; i < 5; ++i) span(trace, stream, i);
  CHECK(sink.of(bs::Lane::compute).size() == 1);
  CHECK(backend.clock().waits == 0);
  backend.clock().passed = UINT64_MAX;
  span(trace, stream, 5);
  CHECK(sink.of(bs::Lane::compute).size() == 5);
  const std::uint64_t made = backend.clock().made;
  for (std::uint32_t i = 6; i < 10; ++i) span(trace, stream, i);
  CHECK(backend.clock().made == made);
  trace.drain();
  CHECK(sink.of(bs::Lane::compute).size() == 10);
}

TEST_CASE("no two events far apart are compared, since their distance is a float") {
  LateBackend backend{bs::HostMode::attached, 400ms};
  Sink sink;
  Trace trace{backend, sink};
  auto stream = backend.make_stream();
  for (std::uint32_t i = 0; i < 50; ++i) span(trace, stream, i);
  trace.drain();
  CHECK(backend.clock().longest < 3s);
  const auto spans = sink.of(bs::Lane::compute);
  REQUIRE(spans.size() == 50);
  for (std::size_t i = 1; i < spans.size(); ++i)
    CHECK(spans[i].begin - spans[i - 1].begin == 800ms);
}

TEST_CASE("nobody listens, or the device's time is left out: no event is recorded") {
  LateBackend backend;
  Sink sink;
  Trace trace{backend, sink};
  auto stream = backend.make_stream();
  trace.pause(true);
  span(trace, stream, 0);
  CHECK(sink.of(bs::Lane::caller).size() == 1);
  trace.pause(false);
  sink.on = false;
  span(trace, stream, 1);
  trace.drain();
  CHECK(backend.clock().records == 0);
  CHECK(sink.events.size() == 1);
}

TEST_CASE("a pass tells copies and visits in device time, all of them once it is drained") {
  for (const bool in_memory : {false, true}) {
    LateBackend backend{bs::HostMode::detached};
    Sink sink;
    const auto images = support::odd_images(8);
    support::ReadScript script;
    std::mt19937 random{1};
    bs::PipelineOptions options;
    options.prefetch_ahead = 1;
    options.chunk_byte_count = 1000;
    options.staging_byte_count = 4096;
    options.computes_on_host = true;
    options.trace = sink;
    bs::AnyStorage tier = in_memory ? bs::AnyStorage{support::MemoryTier{images}}
                                    : bs::AnyStorage{support::ScriptedTier{images, script}};
    bs::BlockPipeline<LateBackend, bs::InlineLoop> pipeline{
        std::move(tier), backend, options, nullptr,
        std::make_unique<bs::InlineLoop>([&](std::size_t) { return random(); },
                                         [&] { return script.release(random()) || true; })};
    auto compute = backend.make_stream();
    const auto order = bs::ascending(0, 8);
    CHECK(support::run_pass(pipeline, images, order, order, compute) == 0);
    pipeline.drain();
    const auto visits = sink.of(bs::Lane::compute), copies = sink.of(bs::Lane::copy_in);
    CHECK(visits.size() == images.size());
    CHECK(sink.of(bs::Lane::caller).size() == visits.size() + copies.size());
    std::map<bs::BlockId, std::uint64_t> copied;
    for (const auto& copy : copies) copied[copy.part.block] += copy.byte_count;
    for (std::uint32_t i = 0; i < images.size(); ++i) {
      std::uint64_t needed = 0;
      for (const auto& segment : images[i].segments) needed += segment.byte_count;
      CHECK((needed == 0 || copied[bs::block_at(i)] >= needed));
    }
    for (const auto& visit : visits) CHECK(visit.end > visit.begin);
  }
}
