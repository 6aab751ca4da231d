// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/trace/perfetto_writer.hpp>

#include <nlohmann/json.hpp>

#include <support/catch.hpp>

#include <map>
#include <sstream>
#include <thread>

namespace bs = block_streamer;
using namespace std::chrono_literals;

namespace {

std::string written(const bs::PerfettoWriter& writer) {
  std::ostringstream out;
  writer.write_to(out);
  return out.str();
}

bs::TraceEvent event(std::string_view name, bs::Lane lane, std::int64_t begin, std::int64_t end,
                     std::uint16_t device = 0) {
  return {name, lane, device, {bs::BlockId{3}, 1}, bs::Nanoseconds{begin}, bs::Nanoseconds{end},
          77};
}

/// Name of the row (metadata) that the first event called `name` lies in.
std::string row_of(const nlohmann::json& trace, std::string_view name) {
  std::map<std::pair<int, int>, std::string> rows;
  for (const auto& e : trace["traceEvents"]) {
    if (e["name"] == "thread_name") rows[{e["pid"], e["tid"]}] = e["args"]["name"];
  }
  for (const auto& e : trace["traceEvents"]) {
    if (e["name"] == name) return rows.at({e["pid"], e["tid"]});
  }
  return "no such event";
}

}  // namespace

TEST_CASE("a trace is JSON with a process per device, a named row per lane and microseconds") {
  bs::PerfettoWriter writer;
  bs::TraceSinkRef sink = writer;
  REQUIRE(sink.enabled());
  sink.record(event("read \"x\"\\\n", bs::Lane::storage, 1'234'567, 2'000'001));
  sink.record(event("layer", bs::Lane::compute, 5, 1'005, 1));
  sink.record(event("ready", bs::Lane::copy_in, 42, 42));

  const auto trace = nlohmann::json::parse(written(writer));
  CHECK(row_of(trace, "read \"x\"\\\n") == "storage");
  CHECK(row_of(trace, "layer") == "compute");
  CHECK(row_of(trace, "ready") == "copy in");
  for (const auto& e : trace["traceEvents"]) {
    if (e["name"] == "layer") {
      CHECK(e["pid"] == 1);
      CHECK(e["ph"] == "X");
      CHECK(e["ts"].get<double>() == Approx(0.005));
      CHECK(e["dur"].get<double>() == Approx(1.0));
      CHECK(e["args"]["block"] == 3);
      CHECK(e["args"]["part"] == 1);
      CHECK(e["args"]["bytes"] == 77);
    }
    if (e["name"] == "ready") CHECK(e["ph"] == "i");
  }
  CHECK(written(writer).find("\"ts\":1234.567,\"ph\":\"X\",\"dur\":765.434") != std::string::npos);
}

TEST_CASE("an empty trace is valid") {
  CHECK(nlohmann::json::parse(written(bs::PerfettoWriter{}))["traceEvents"].empty());
}

TEST_CASE("times before the epoch keep their sign") {
  CHECK(bs::detail::microseconds(bs::Nanoseconds{-5}) == "-0.005");
  CHECK(bs::detail::microseconds(bs::Nanoseconds{-12'345}) == "-12.345");
  CHECK(bs::detail::microseconds(bs::Nanoseconds{1'000}) == "1.000");
}

TEST_CASE("the text does not depend on the order of arrival") {
  std::vector<bs::TraceEvent> events;
  for (int i = 0; i < 50; ++i) {
    events.push_back(event(i % 2 ? "a" : "b", static_cast<bs::Lane>(i % 6), i * 37 % 100,
                           i * 37 % 100 + i % 9, static_cast<std::uint16_t>(i % 2)));
  }
  bs::PerfettoWriter forward;
  bs::PerfettoWriter backward;
  for (const auto& e : events) forward.record(e);
  for (auto e = events.rbegin(); e != events.rend(); ++e) backward.record(*e);
  CHECK(written(forward) == written(backward));
}

TEST_CASE("overlapping intervals of a lane go to rows in which intervals only nest") {
  bs::PerfettoWriter writer;
  writer.record(event("outer", bs::Lane::storage, 0, 100));
  writer.record(event("inner", bs::Lane::storage, 10, 20));
  writer.record(event("crossing", bs::Lane::storage, 50, 150));
  writer.record(event("after", bs::Lane::storage, 100, 200));
  const auto trace = nlohmann::json::parse(written(writer));
  CHECK(row_of(trace, "outer") == "storage");
  CHECK(row_of(trace, "inner") == "storage");
  CHECK(row_of(trace, "crossing") == "storage 2");
  CHECK(row_of(trace, "after") == "storage");
}

TEST_CASE("a full buffer drops and counts, from many threads at once") {
  bs::PerfettoWriter writer{100};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&writer] {
      for (int i = 0; i < 100; ++i) writer.record(event("e", bs::Lane::caller, i, i + 1));
    });
  }
  for (auto& t : threads) t.join();
  CHECK(writer.size() == 100);
  CHECK(writer.dropped() == 300);
  CHECK(nlohmann::json::parse(written(writer))["otherData"]["dropped"] == "300");
  writer.clear();
  CHECK(writer.size() == 0);
  CHECK(writer.dropped() == 0);
}

TEST_CASE("a disabled writer says so") {
  bs::PerfettoWriter writer;
  writer.enable(false);
  CHECK_FALSE(bs::TraceSinkRef{writer}.enabled());
}

TEST_CASE("a path that cannot be written is an error that names it") {
  const bs::PerfettoWriter writer;
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / "no such folder" / "t";
  try {
    writer.write_to(path);
    FAIL("written");
  } catch (const bs::StorageError& error) {
    CHECK(std::string{error.what()}.find(path.string()) != std::string::npos);
    CHECK(error.code() == std::errc::no_such_file_or_directory);
  }
}
