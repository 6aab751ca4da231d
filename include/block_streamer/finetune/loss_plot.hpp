// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {
namespace detail {

using LossPoint = std::pair<double, double>;  ///< step, loss

/// At most `count` points: neighbours are taken together, each group by its mean step and mean
/// loss. Losses that are not finite are left out.
[[nodiscard]] inline std::vector<LossPoint> thinned(
    std::span<const std::pair<std::uint64_t, double>> losses, std::size_t count) {
  std::vector<LossPoint> points;
  for (const auto& [step, loss] : losses) {
    if (std::isfinite(loss)) points.emplace_back(static_cast<double>(step), loss);
  }
  const std::size_t group = (points.size() + count - 1) / count;
  if (group <= 1) return points;
  std::vector<LossPoint> means;
  for (std::size_t begin = 0; begin < points.size(); begin += group) {
    const std::size_t size = std::min(group, points.size() - begin);
    LossPoint sum;
    for (std::size_t i = begin; i < begin + size; ++i) {
      sum.first += points[i].first;
      sum.second += points[i].second;
    }
    means.emplace_back(sum.first / static_cast<double>(size),
                       sum.second / static_cast<double>(size));
  }
  return means;
}

/// 1, 2 or 5 times a power of ten: the largest that makes at least four parts of `range`.
[[nodiscard]] inline double tick_distance(double range) {
  const double power = std::pow(10.0, std::floor(std::log10(range / 4)));
  for (const double factor : {5.0, 2.0}) {
    if (power * factor <= range / 4) return power * factor;
  }
  return power;
}

[[nodiscard]] inline std::string short_number(double value, int digits) {
  std::array<char, 64> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value,
                                     std::chars_format::general, digits)
                           .ptr};
}

/// A range with a width, also where all values are equal.
struct PlotRange {
  double low = 0, high = 1;
  static PlotRange of(double low, double high) {
    if (high > low) return {low, high};
    return {low - 0.5, high + 0.5};
  }
  [[nodiscard]] double share(double value) const { return (value - low) / (high - low); }
};

/// The drawing area within a picture of 800 × 420.
struct PlotFrame {
  PlotRange steps, losses;
  static constexpr double left = 70, right = 780, top = 40, bottom = 370;
  [[nodiscard]] std::string x(double step) const {
    return short_number(left + steps.share(step) * (right - left), 6);
  }
  [[nodiscard]] std::string y(double loss) const {
    return short_number(bottom - losses.share(loss) * (bottom - top), 6);
  }
};

/// Multiples of `distance` within the range.
[[nodiscard]] inline std::vector<double> ticks_of(const PlotRange& range, double distance) {
  std::vector<double> ticks;
  for (double i = std::ceil(range.low / distance); i * distance <= range.high; ++i)
    ticks.push_back(i * distance);
  return ticks;
}

[[nodiscard]] inline std::string plot_grid(const PlotFrame& frame) {
  std::string svg;
  const double up = tick_distance(frame.losses.high - frame.losses.low);
  for (const double at : ticks_of(frame.losses, up)) {
    const std::string y = frame.y(at);
    svg += "<path d=\"M70 " + y + "H780\" stroke=\"#ddd\"/>\n<text x=\"62\" y=\"" + y +
           "\" dy=\"4\" text-anchor=\"end\">" + short_number(at, 4) + "</text>\n";
  }
  const double along = std::max(1.0, tick_distance(frame.steps.high - frame.steps.low));
  for (const double at : ticks_of(frame.steps, along)) {
    const std::string x = frame.x(at);
    svg += "<path d=\"M" + x + " 370v5\" stroke=\"#666\"/>\n<text x=\"" + x +
           "\" y=\"390\" text-anchor=\"middle\">" + short_number(at, 9) + "</text>\n";
  }
  return svg;
}

/// A line through the points, or a dot where there is one.
[[nodiscard]] inline std::string plot_line(const PlotFrame& frame,
                                           const std::vector<LossPoint>& points,
                                           const std::string& color) {
  if (points.empty()) return {};
  if (points.size() == 1) {
    return "<circle r=\"3\" fill=\"" + color + "\" cx=\"" + frame.x(points[0].first) + "\" cy=\"" +
           frame.y(points[0].second) + "\"/>\n";
  }
  std::string svg =
      "<polyline fill=\"none\" stroke=\"" + color + "\" stroke-width=\"1.5\" points=\"";
  for (const auto& [step, loss] : points) svg += frame.x(step) + "," + frame.y(loss) + " ";
  return svg + "\"/>\n";
}

/// What both lines lie in. @pre a point is there.
[[nodiscard]] inline PlotFrame frame_of(const std::vector<LossPoint>& first,
                                        const std::vector<LossPoint>& second) {
  std::vector<double> steps, losses;
  for (const auto* points : {&first, &second}) {
    for (const auto& [step, loss] : *points) {
      steps.push_back(step);
      losses.push_back(loss);
    }
  }
  const auto range = [](const std::vector<double>& values) {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    return PlotRange::of(*low, *high);
  };
  return {range(steps), range(losses)};
}

}  // namespace detail

/// @brief The loss over the steps as an SVG picture of 800 × 420, and that on held-out rows. Of
/// more than 700 steps neighbours are drawn as their mean; steps without a finite loss are left
/// out. The same losses give the same text.
[[nodiscard]] inline std::string loss_plot(
    std::span<const std::pair<std::uint64_t, double>> losses,
    std::span<const std::pair<std::uint64_t, double>> held_out = {}) {
  const std::vector<detail::LossPoint> points = detail::thinned(losses, 700);
  const std::vector<detail::LossPoint> measured = detail::thinned(held_out, 700);
  std::string svg =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 800 420\" "
      "font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n"
      "<rect width=\"800\" height=\"420\" fill=\"#fff\"/>\n"
      "<text x=\"70\" y=\"24\">loss, nats per trained token</text>\n"
      "<text x=\"780\" y=\"410\" text-anchor=\"end\">step</text>\n";
  if (points.empty() && measured.empty()) return svg + "</svg>\n";
  if (!measured.empty()) {
    svg +=
        "<text x=\"780\" y=\"24\" text-anchor=\"end\" fill=\"#b8540f\">on held-out rows</text>\n";
  }
  const detail::PlotFrame frame = detail::frame_of(points, measured);
  svg += detail::plot_grid(frame) + "<path d=\"M70 40V370H780\" fill=\"none\" stroke=\"#666\"/>\n";
  return svg + detail::plot_line(frame, points, "#1f5fa8") +
         detail::plot_line(frame, measured, "#b8540f") + "</svg>\n";
}

}  // namespace block_streamer::inline v1
