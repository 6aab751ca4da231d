// SPDX-License-Identifier: Apache-2.0
#include "common_options.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <string_view>
#include <system_error>
#include <utility>

namespace block_streamer_cli {
namespace {

bool is_digit(unsigned char c) {
  return std::isdigit(c) != 0;
}

constexpr std::array<std::pair<std::string_view, double>, 9> size_units{{{"", 1},
                                                                         {"B", 1},
                                                                         {"KiB", 0x1p10},
                                                                         {"MiB", 0x1p20},
                                                                         {"GiB", 0x1p30},
                                                                         {"TiB", 0x1p40},
                                                                         {"KB", 1e3},
                                                                         {"MB", 1e6},
                                                                         {"GB", 1e9}}};

/// For transform(): "1.5GiB" becomes its number of bytes.
std::string replace_size(std::string& text) {
  double value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value, std::chars_format::fixed);
  const std::string_view unit{end, static_cast<std::size_t>(last - end)};
  const auto known = std::find_if(size_units.begin(), size_units.end(),
                                  [&](const auto& u) { return u.first == unit; });
  if (error != std::errc{} || !(value >= 0) || known == size_units.end() ||
      value * known->second >= 0x1p63) {
    return "'" + text + "' is no size such as 512MiB (units: B, KiB, MiB, GiB, TiB, KB, MB, GB)";
  }
  text = std::to_string(static_cast<std::uint64_t>(value * known->second));
  return {};
}

std::string check_device(const std::string& text) {
  if (text == "cpu" || text == "cuda") return {};
  const bool numbered = text.starts_with("cuda:") && text.size() > 5 && text.size() <= 8 &&
                        std::all_of(text.begin() + 5, text.end(), is_digit);
  return numbered ? std::string{} : "'" + text + "' is none of cpu, cuda, cuda:N";
}

}  // namespace

std::string check_whole_number(const std::string& text) {
  const bool digits = !text.empty() && std::all_of(text.begin(), text.end(), is_digit);
  return digits ? std::string{} : "'" + text + "' is no whole number from 0 up";
}

void add_model_option(CLI::App& app, std::filesystem::path& model) {
  app.add_option("--model", model, "Hugging Face model folder")->required()->type_name("DIR");
}

void add_common_options(CLI::App& app, CommonOptions& options) {
  add_model_option(app, options.model);
  const std::string group = "Streaming";
  app.add_option("--device", options.device, "cpu, cuda or cuda:N (default: cuda when usable)")
      ->check(check_device)
      ->type_name("DEVICE")
      ->group(group);
  app.add_option("--storage", options.storage,
                 "where blocks wait: auto, ram, tiered (some in memory, the rest in files), mmap, "
                 "file, pinned (= ram); auto is ram when the model fits in memory, else tiered")
      ->check(CLI::IsMember({"auto", "ram", "tiered", "mmap", "file", "pinned"}))
      ->type_name("TIER")
      ->group(group)
      ->capture_default_str();
  app.add_option("--prefetch-ahead", options.prefetch_ahead,
                 "blocks on their way while one computes; one more is resident")
      ->check(CLI::Range(0U, 1000000U))
      ->type_name("N")
      ->group(group)
      ->capture_default_str();
  app.add_option("--device-budget", options.device_budget,
                 "device memory for cached blocks, e.g. 512MiB (default: none)")
      ->transform(CLI::Validator{replace_size, ""})
      ->type_name("BYTES")
      ->group(group);
  app.add_option("--ram-budget", options.ram_budget,
                 "memory for the blocks that tiered storage keeps in memory (default: what is "
                 "available less 2 GiB or 15 %)")
      ->transform(CLI::Validator{replace_size, ""})
      ->type_name("BYTES")
      ->group(group);
  app.add_option("--dtype", options.dtype,
                 "what to compute in: auto, bf16, fp16, fp32; auto is the stored type on CUDA, on "
                 "the CPU bf16 where that is native and faster, else fp32")
      ->check(CLI::IsMember({"auto", "bf16", "fp16", "fp32"}))
      ->type_name("TYPE")
      ->group(group)
      ->capture_default_str();
  app.add_option("--trace", options.trace, "write a timeline for ui.perfetto.dev")
      ->type_name("FILE")
      ->group(group);
  app.add_option("--stats", options.stats, "write what streaming cost, as JSON")
      ->type_name("FILE.json")
      ->group(group);
}

}  // namespace block_streamer_cli
