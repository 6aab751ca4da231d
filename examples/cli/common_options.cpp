// SPDX-License-Identifier: Apache-2.0
#include "common_options.hpp"

#include "byte_size.hpp"
#include "usage_error.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

namespace block_streamer_cli {
namespace {

bool is_digit(unsigned char c) {
  return std::isdigit(c) != 0;
}

/// For transform(): "1.5GiB" becomes its number of bytes.
std::string replace_size(std::string& text) {
  std::uint64_t byte_count = 0;
  std::string what = parse_byte_size(text, byte_count);
  if (what.empty()) text = std::to_string(byte_count);
  return what;
}

std::string check_device(const std::string& text) {
  if (text == "cpu" || text == "cuda") return {};
  const bool numbered = text.starts_with("cuda:") && text.size() > 5 && text.size() <= 8 &&
                        std::all_of(text.begin() + 5, text.end(), is_digit);
  return numbered ? std::string{} : "'" + text + "' is none of cpu, cuda, cuda:N";
}

/// The one tier that is not of this system.
std::string refuse_iocp(const std::string& text) {
  if (text != "iocp") return {};
  return "'iocp' reads through Windows' completion ports, which this system does not have; take "
         "io_uring";
}

}  // namespace

CLI::Validator size_in_bytes() {
  return CLI::Validator{replace_size, ""};
}

CLI::Validator file_size_in_bytes() {
  return CLI::Validator{[](std::string& text) {
                          const std::string given = text;
                          std::string what = replace_size(text);
                          if (what.empty() && text == "0") {
                            what = "'" + given + "': a file takes at least 1 byte";
                          }
                          return what;
                        },
                        ""};
}

CLI::Validator whole_number(std::uint64_t least, std::uint64_t most) {
  return CLI::Validator{
      [least, most](std::string& text) {
        std::uint64_t value = 0;
        const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool whole = !text.empty() && std::all_of(text.begin(), text.end(), is_digit);
        if (whole && read.ec == std::errc{} && value >= least && value <= most) {
          text = std::to_string(value);
          return std::string{};
        }
        return "'" + text + "' is no whole number from " + std::to_string(least) + " to " +
               std::to_string(most);
      },
      ""};
}

std::string check_number(const std::string& text) {
  double value = 0;
  const bool number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
  return number ? std::string{} : "'" + text + "' is no number";
}

std::string check_positive(const std::string& text) {
  double value = 0;
  const bool number = CLI::detail::lexical_cast(text, value);
  return number && value > 0 && value <= std::numeric_limits<float>::max()
             ? std::string{}
             : "'" + text + "' is no number above 0 (and at most 3.4e38)";
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
  app.add_option(
         "--storage", options.storage,
         "where blocks wait: auto, ram, tiered (some in memory, the rest as io_uring), "
         "mmap, file, io_uring, pinned (= ram); auto is ram when the model fits in memory, else "
         "tiered; io_uring reads past the page cache, by threads where the system refuses it")
      ->check(refuse_iocp)
      ->check(CLI::IsMember({"auto", "ram", "tiered", "mmap", "file", "io_uring", "pinned"}))
      ->type_name("TIER")
      ->group(group)
      ->capture_default_str();
  app.add_option("--prefetch-ahead", options.prefetch_ahead,
                 "blocks on their way while one computes; one more is resident")
      ->transform(whole_number(0, 1'000'000))
      ->type_name("N")
      ->group(group)
      ->capture_default_str();
  app.add_option(
         "--device-budget", options.device_budget,
         "device memory for blocks that stay, e.g. 512MiB or 1.5GiB; at least one block's size "
         "(default: none)")
      ->transform(size_in_bytes())
      ->type_name("BYTES")
      ->group(group);
  app.add_option("--ram-budget", options.ram_budget,
                 "memory for the blocks that tiered storage keeps in memory (default: what is "
                 "available less 2 GiB or 15 %)")
      ->transform(size_in_bytes())
      ->type_name("BYTES")
      ->group(group);
  app.add_option("--dtype", options.dtype,
                 "what to compute in: auto, bf16, fp16, fp32; auto is the stored type on CUDA, on "
                 "the CPU bf16 where that is native and faster, else fp32")
      ->check(CLI::IsMember({"auto", "bf16", "fp16", "fp32"}))
      ->type_name("TYPE")
      ->group(group)
      ->capture_default_str();
  app.add_option(
         "--resident", options.resident,
         "what stays on the device besides blocks: all (embedding and head), head (rows of "
         "the embedding are read from the file), none (the head is streamed too), auto: all "
         "if that fits beside the slots, else head, else none")
      ->check(CLI::IsMember({"auto", "all", "head", "none"}))
      ->type_name("WHAT")
      ->group(group)
      ->capture_default_str();
  app.add_flag("--verify-reads", options.verify_reads,
               "compare what is read with the model's checksums (see convert and checksum)")
      ->group(group);
  app.add_option("--trace", options.trace, "write a timeline for ui.perfetto.dev")
      ->type_name("FILE")
      ->group(group);
  app.add_option("--stats", options.stats, "write what streaming cost, as JSON")
      ->type_name("FILE.json")
      ->group(group);
}

void add_adapter_folders(CLI::App& app, std::vector<std::filesystem::path>& folders) {
  app.add_option("--adapter", folders,
                 "a LoRA adapter in PEFT's format; of several, each with the option, the sum")
      ->type_name("DIR")
      ->allow_extra_args(false);
}

void expect_distinct_adapters(const std::vector<std::filesystem::path>& folders) {
  std::error_code ignored;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (folders[i] != folders[j] && !std::filesystem::equivalent(folders[i], folders[j], ignored))
        continue;
      throw UsageError{"--adapter names the folder " + folders[i].string() + " twice"};
    }
  }
}

void expect_consistent(const CommonOptions& options) {
  if (options.ram_budget && options.storage != "tiered" && options.storage != "auto") {
    throw UsageError{"--ram-budget is for --storage tiered or auto, not for " + options.storage};
  }
}

}  // namespace block_streamer_cli
