// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/finetune/loss_plot.hpp>
#include <block_streamer/finetune/metrics_log.hpp>
#include <block_streamer/finetune/row_order.hpp>
#include <block_streamer/finetune/run_folder.hpp>
#include <block_streamer/finetune/run_record.hpp>
#include <block_streamer/finetune/save_schedule.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <support/catch.hpp>
#include <support/safetensors_files.hpp>

#if !defined(_WIN32)
#include <sys/stat.h>
#endif

namespace bs = block_streamer;
using Losses = std::vector<std::pair<std::uint64_t, double>>;

TEST_CASE("an order that seeks goes on as one that was taken from the beginning") {
  for (const auto shuffle : {bs::RowShuffle::by_seed, bs::RowShuffle::none}) {
    bs::RowOrder whole{7, 3, shuffle};
    const auto rows = whole.take(40);
    for (std::size_t at = 0; at <= 30; ++at) {
      bs::RowOrder order{7, 3, shuffle};
      (void)order.take(at % 5);
      order.seek(at);
      CHECK(order.take(10) ==
            std::vector<std::size_t>(rows.begin() + static_cast<std::ptrdiff_t>(at),
                                     rows.begin() + static_cast<std::ptrdiff_t>(at + 10)));
      CHECK(order.epoch() == (at + 9) / 7 + 1);
    }
  }
}

TEST_CASE("an order that is not shuffled is that of the file in every epoch") {
  bs::RowOrder order{3, 9, bs::RowShuffle::none};
  CHECK(order.take(7) == std::vector<std::size_t>{0, 1, 2, 0, 1, 2, 0});
}

TEST_CASE("every step draws with a seed of its own, also where run seeds are neighbours") {
  std::set<std::uint64_t> low_words;  // a generator may use 32 bits only
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    for (std::uint64_t step = 1; step <= 500; ++step)
      low_words.insert(bs::step_seed(seed, step) & 0xffffffffU);
  }
  CHECK(low_words.size() == 2000);
}

TEST_CASE("a run saves every so many steps, or after so much time since the last time") {
  using std::chrono::minutes;
  const bs::SaveSchedule::Clock::time_point begin{};
  const bs::SaveSchedule by_steps{3, minutes{10}, begin};
  CHECK_FALSE(by_steps.is_due(2, begin + minutes{100}));
  CHECK(by_steps.is_due(3, begin));
  bs::SaveSchedule by_time{std::nullopt, minutes{10}, begin};
  CHECK_FALSE(by_time.is_due(1000, begin + minutes{9}));
  CHECK(by_time.is_due(1001, begin + minutes{10}));
  by_time.saved(begin + minutes{12});
  CHECK_FALSE(by_time.is_due(1002, begin + minutes{21}));
  CHECK(by_time.is_due(1003, begin + minutes{22}));
}

TEST_CASE("a record names the first field that differs, and what it does not know") {
  bs::RunRecord record;
  record.set("--lr", 0.1);
  record.set("--steps", std::uint64_t{1} << 63);
  CHECK(record.fields()[0].second == "0.1");
  CHECK(record.fields()[1].second == "9223372036854775808");
  std::map<std::string, std::string> saved(record.fields().begin(), record.fields().end());
  CHECK_NOTHROW(bs::expect_same_run("here", record, saved));
  saved["--steps"] = "5";
  CHECK_THROWS_WITH(bs::expect_same_run("here", record, saved),
                    ContainsSubstring("here") &&
                        ContainsSubstring("--steps was 5, here it is 9223372036854775808"));
  saved.erase("--lr");
  CHECK_THROWS_WITH(bs::expect_same_run("here", record, saved),
                    ContainsSubstring("does not say its --lr"));
}

TEST_CASE("a log that goes on drops lines of lost steps and one that was cut short") {
  const support::TempFolder folder;
  const auto path = folder / "metrics.jsonl";
  const auto line = [](std::uint64_t step, double loss) {
    return bs::metrics_line({step, loss, 0.1, 7, 2.5, 0.25, !std::isfinite(loss)});
  };
  CHECK(line(3, 1.5) ==
        "{\"step\": 3, \"loss\": 1.5, \"learning_rate\": 0.1, \"tokens\": 7, \"grad_norm\": 2.5, "
        "\"seconds\": 0.25}\n");
  CHECK(line(4, std::nan("")) ==
        "{\"step\": 4, \"loss\": null, \"learning_rate\": 0.1, \"tokens\": 7, \"grad_norm\": null, "
        "\"seconds\": 0.25, \"skipped\": true}\n");
  const std::string kept = line(1, 3) + line(2, std::nan(""));
  support::write_text(path, kept + "nonsense\n" + line(3, 2) + line(4, 1) + "{\"step\": 5, \"lo");
  {
    bs::MetricsLog log{path, 3};
    CHECK(support::read_text(path) == kept + line(3, 2));
    log.add({4, 1.25});
    CHECK(log.losses().size() == 4);
    CHECK(log.losses()[3] == std::pair<std::uint64_t, double>{4, 1.25});
    CHECK(support::read_text(path).ends_with("\"seconds\": 0}\n"));  // before it is closed
  }
  CHECK(bs::MetricsLog(path, 0).losses().empty());
  CHECK(support::read_text(path).empty());
}

TEST_CASE("a log keeps a whole last line without its newline and counts lines that are missing") {
  const support::TempFolder folder;
  const auto path = folder / "metrics.jsonl";
  const auto line = [](std::uint64_t step) { return bs::metrics_line({step, 1.5, 0.1, 7, 2, 1}); };
  const std::string open_end = line(3).substr(0, line(3).size() - 1);
  support::write_text(path, line(1) + line(2) + open_end);
  CHECK(bs::MetricsLog(path, 3).missing() == 0);
  CHECK(support::read_text(path) == line(1) + line(2) + line(3));
  support::write_text(path, line(1) + line(2) + open_end);
  CHECK(bs::MetricsLog(path, 2).missing() == 0);
  CHECK(support::read_text(path) == line(1) + line(2));
  support::write_text(path, line(1) + "{\"step\": 2, \"lo\n" + line(4) + open_end);
  CHECK(bs::MetricsLog(path, 5).missing() == 3);
  CHECK(support::read_text(path) == line(1) + line(4));
  std::filesystem::remove(path);
  CHECK(bs::MetricsLog(path, 5).missing() == 5);
  CHECK(bs::MetricsLog(path, 0).missing() == 0);
}

TEST_CASE("a log keeps losses on held-out rows of the steps that it keeps, once each") {
  const support::TempFolder folder;
  const auto path = folder / "metrics.jsonl";
  const auto line = [](std::uint64_t step) { return bs::metrics_line({step, 1.5, 0.1, 7, 2, 1}); };
  CHECK(bs::held_out_line(2, 0.5) == "{\"step\": 2, \"held_out_loss\": 0.5}\n");
  const std::string kept =
      bs::held_out_line(0, 4) + line(1) + line(2) + bs::held_out_line(2, 0.5) + line(3);
  support::write_text(path, bs::held_out_line(0, 4) + bs::held_out_line(0, 5) + line(1) +
                                bs::held_out_line(3, 9) + line(2) + bs::held_out_line(2, 0.5) +
                                line(3) + line(4) + bs::held_out_line(4, 0.25));
  {
    bs::MetricsLog log{path, 3};
    CHECK(support::read_text(path) == kept);
    CHECK(log.held_out() == Losses{{0, 4}, {2, 0.5}});
    CHECK(log.losses().size() == 3);
    CHECK(log.missing() == 0);
    log.add({4, 1});
    log.add_held_out(4, 0.125);
    CHECK(log.held_out().back() == std::pair<std::uint64_t, double>{4, 0.125});
  }
  CHECK(support::read_text(path).ends_with(bs::held_out_line(4, 0.125)));
  CHECK(bs::MetricsLog(path, 0).held_out().empty());
}

TEST_CASE("a log that is no regular file is refused and stays as it is") {
  const support::TempFolder folder;
  const auto path = folder / "metrics.jsonl";
  std::filesystem::create_directory(path);
#if !defined(_WIN32)
  std::filesystem::remove(path);
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
#endif
  for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{2}}) {
    CHECK_THROWS_WITH(bs::MetricsLog(path, step), ContainsSubstring("no regular file"));
  }
  CHECK_FALSE(std::filesystem::is_regular_file(path));
}

TEST_CASE("a log says which file cannot be written") {
  const support::TempFolder folder;
  CHECK_THROWS_WITH(bs::MetricsLog(folder / "nowhere/metrics.jsonl", 0),
                    ContainsSubstring("metrics.jsonl"));
}

TEST_CASE("a plot draws every step, or the means of neighbours where there are many") {
  const auto points = [](const std::string& svg) {
    const std::size_t begin = svg.find("points=\"") + 8;
    return std::count(svg.begin() + static_cast<std::ptrdiff_t>(begin), svg.end(), ',');
  };
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(bs::loss_plot({}).ends_with("</svg>\n"));
  CHECK(bs::loss_plot(Losses{{1, 2.0}}).find("<circle") != std::string::npos);  // a line of one
  CHECK(points(bs::loss_plot(Losses{{1, 2.0}, {2, infinity}, {3, std::nan("")}, {4, 1.0}})) == 2);
  Losses many;
  for (std::uint64_t step = 1; step <= 1401; ++step)
    many.emplace_back(step, step <= 3 ? 6.0 * static_cast<double>(step) : 3.0);
  const std::string svg = bs::loss_plot(many);
  CHECK(points(svg) == 467);  // three steps each: 700 points at most
  CHECK(svg.find("points=\"70,40 ") !=
        std::string::npos);  // 6, 12 and 18 are one point, the highest
}

TEST_CASE("losses on held-out rows are a line of their own, in the same frame") {
  const std::string svg = bs::loss_plot(Losses{{1, 2.0}, {2, 1.5}}, Losses{{0, 3.0}, {2, 1.0}});
  CHECK(svg.find("points=\"425,205 780,287.5 \"") != std::string::npos);
  CHECK(svg.find("points=\"70,40 780,370 \"") != std::string::npos);
  CHECK(svg.find("held-out rows") != std::string::npos);
  CHECK(bs::loss_plot(Losses{{1, 2.0}}).find("held-out") == std::string::npos);
  CHECK(bs::loss_plot({}, Losses{{0, 3.0}}).find("<circle") != std::string::npos);
}

TEST_CASE("the marks beside a plot are round numbers within it") {
  for (const auto& [low, high] :
       {std::pair{0.0013, 0.0029}, {1.9, 11.5}, {3.0, 3.0}, {-1e9, 2e9}}) {
    const auto range = bs::detail::PlotRange::of(low, high);
    const double distance = bs::detail::tick_distance(range.high - range.low);
    const auto ticks = bs::detail::ticks_of(range, distance);
    CHECK(ticks.size() >= 4);
    CHECK(ticks.size() <= 11);
    CHECK(ticks.front() >= range.low);
    CHECK(ticks.back() <= range.high);
  }
}

TEST_CASE("a folder is free if nothing is there but what a run leaves that died while it began") {
  const support::TempFolder parent;
  const bs::RunFolder folder{parent / "run"};
  CHECK(folder.is_free());
  folder.prepare();
  CHECK(folder.is_free());
  const auto part = folder.state().parent_path() / ".state.safetensors.part77-0";
  support::write_text(part, "half");
  CHECK(folder.is_free());
  CHECK_FALSE(folder.holds_run());
  folder.prepare();
  CHECK_FALSE(std::filesystem::exists(part));
  support::write_text(folder.state(), "state");
  CHECK_FALSE(folder.is_free());
  CHECK(folder.holds_run());
  std::filesystem::remove(folder.state());
  support::write_text(folder.path() / "notes.txt", "mine");
  CHECK_FALSE(folder.is_free());
  folder.prepare();
  CHECK(std::filesystem::exists(folder.path() / "notes.txt"));
}
