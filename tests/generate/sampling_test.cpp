// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/generate/sampling.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;

namespace {

std::map<std::int32_t, double> shares(const bs::SamplingOptions& options,
                                      const std::vector<float>& logits, int draws = 20000) {
  bs::Sampler sampler{options};
  std::map<std::int32_t, double> share;
  for (int i = 0; i < draws; ++i) share[sampler.choose(logits)] += 1.0 / draws;
  return share;
}

std::vector<float> logs(std::initializer_list<double> probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

/// What the error says; empty without one.
std::string message_of(const auto& action) {
  try {
    action();
  } catch (const bs::Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("random numbers are the same on every machine") {
  bs::RandomStream first{0}, second{1, 2};
  CHECK(first.bits() == bs::RandomStream{0}.bits());
  CHECK(bs::RandomStream{0, 1}.bits() != bs::RandomStream{0, 0}.bits());
  CHECK(bs::RandomStream{1, 0}.bits() != bs::RandomStream{0, 1}.bits());
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const double x = second.uniform();
    REQUIRE((x >= 0 && x < 1));
    sum += x;
  }
  CHECK(sum / 10000 == Approx(0.5).margin(0.02));
}

TEST_CASE("greedy takes the largest logit and of equal ones the lowest id") {
  CHECK(bs::greedy_token(std::vector<float>{-3.F, 2.F, 2.F, 1.F}) == 1);
  bs::Sampler greedy{{}};
  CHECK(greedy.choose(std::vector<float>{0.F, 0.F}) == 0);
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(bs::greedy_token(std::vector<float>{-infinity, -7.F}) == 1);
}

TEST_CASE("logits that are no finite numbers are refused by name") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(message_of([&] {
          static_cast<void>(bs::greedy_token(std::vector<float>{1.F, nan}));
        }).find("token 1 is not a number") != std::string::npos);
  CHECK_THROWS_AS(bs::greedy_token(std::vector<float>{1.F, infinity}), bs::Error);
  CHECK_THROWS_AS(bs::greedy_token(std::vector<float>{-infinity, -infinity}), bs::Error);
}

TEST_CASE("options out of range are refused") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double t : {-1.0, nan, std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_AS(bs::Sampler{bs::SamplingOptions{.temperature = t}}, bs::UnsupportedError);
  }
  for (const double p : {0.0, 1.5, nan}) {
    CHECK_THROWS_AS(bs::Sampler{bs::SamplingOptions{.top_p = p}}, bs::UnsupportedError);
  }
}

TEST_CASE("at temperature 1 tokens come in proportion to their probabilities") {
  const auto share = shares({.temperature = 1, .seed = 5}, logs({0.5, 0.3, 0.2}));
  CHECK(share.at(0) == Approx(0.5).margin(0.015));
  CHECK(share.at(1) == Approx(0.3).margin(0.015));
  CHECK(share.at(2) == Approx(0.2).margin(0.015));
}

TEST_CASE("a temperature divides the logits") {
  // At 0.5 probabilities are squared before they are normalised.
  const auto share = shares({.temperature = 0.5, .seed = 5}, logs({0.6, 0.4}));
  CHECK(share.at(0) == Approx(0.36 / 0.52).margin(0.015));
}

TEST_CASE("top-k keeps the k largest, at a tie the lower ids") {
  const auto share =
      shares({.temperature = 1, .top_k = 2, .seed = 1}, logs({0.1, 0.25, 0.4, 0.25}));
  CHECK(share.size() == 2);
  CHECK(share.at(2) == Approx(0.4 / 0.65).margin(0.015));
  CHECK(share.at(1) == Approx(0.25 / 0.65).margin(0.015));
  CHECK(shares({.temperature = 9, .top_k = 1}, logs({0.3, 0.4, 0.3}), 50).size() == 1);
  CHECK(shares({.temperature = 1, .top_k = 99}, logs({0.3, 0.4, 0.3})).size() == 3);
}

TEST_CASE("top-p keeps the shortest beginning that reaches the share") {
  const auto logits = logs({0.1, 0.5, 0.15, 0.25});
  CHECK(shares({.temperature = 1, .top_p = 0.4}, logits, 500).size() == 1);
  const auto two = shares({.temperature = 1, .top_p = 0.7}, logits);
  CHECK(two.size() == 2);
  CHECK(two.at(1) == Approx(0.5 / 0.75).margin(0.015));
  CHECK(shares({.temperature = 1, .top_p = 0.999}, logits).size() == 4);
}

TEST_CASE("top-p measures what top-k left") {
  // Of 0.5, 0.25 the first makes up 0.667: alone it does not reach 0.7.
  const auto share =
      shares({.temperature = 1, .top_k = 2, .top_p = 0.7}, logs({0.1, 0.5, 0.15, 0.25}));
  CHECK(share.size() == 2);
}

TEST_CASE("top-p is exact where many tokens are needed") {
  // 1,000 equal tokens: the 900 of lowest ids stay.
  const std::vector<float> flat(1000, 0.5F);
  bs::Sampler sampler{{.temperature = 1, .top_p = 0.8995}};
  std::set<std::int32_t> seen;
  for (int i = 0; i < 20000; ++i) seen.insert(sampler.choose(flat));
  CHECK(*seen.rbegin() == 899);
  CHECK(seen.size() == 900);
}

TEST_CASE("a seed fixes the tokens and rows draw from streams of their own") {
  const auto draw = [](std::uint64_t seed, std::uint64_t row) {
    bs::Sampler sampler{{.temperature = 1, .seed = seed}, row};
    std::string text;
    const std::vector<float> flat(26, 0.F);
    for (int i = 0; i < 40; ++i) text += static_cast<char>('a' + sampler.choose(flat));
    return text;
  };
  CHECK(draw(7, 0) == draw(7, 0));
  CHECK(draw(7, 0) != draw(8, 0));
  CHECK(draw(7, 0) != draw(7, 1));
}

TEST_CASE("a token of probability zero is never drawn") {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto share = shares({.temperature = 1}, {-infinity, 0.F, -infinity}, 1000);
  CHECK(share.size() == 1);
  CHECK(share.count(1) == 1);
}
