// SPDX-License-Identifier: Apache-2.0
// What the tests of text/ share: the recorded results, scratch files, the optional large model.
#pragma once

#include <block_streamer/text/tokenizer.hpp>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

namespace text_fixtures {

using json = nlohmann::json;
using Ids = std::vector<std::int32_t>;

inline std::filesystem::path folder() {
  return BLOCK_STREAMER_TEXT_FIXTURES;
}

inline std::string contents(const std::filesystem::path& path) {
  std::ifstream in{path, std::ios::binary};
  return {std::istreambuf_iterator<char>{in}, {}};
}

inline json load(const std::string& name) {
  return json::parse(contents(folder() / name));
}

/// A file that is gone when the test ends.
class ScratchFile {
 public:
  ScratchFile(const std::string& name, std::string_view text)
      : folder_{std::filesystem::temp_directory_path() / ("block_streamer_text_" + unique())},
        path_{folder_ / name} {
    std::filesystem::create_directories(folder_);
    std::ofstream{path_, std::ios::binary}.write(text.data(),
                                                 static_cast<std::streamsize>(text.size()));
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }

 private:
  [[nodiscard]] std::string unique() const {
    return std::to_string(reinterpret_cast<std::uintptr_t>(this)) + "_" +
           std::to_string(std::hash<std::string>{}(std::to_string(::getpid())));
  }
  std::filesystem::path folder_, path_;
};

inline block_streamer::Tokenizer tokenizer_from(const json& document) {
  const ScratchFile file{"tokenizer.json", document.dump()};
  return block_streamer::Tokenizer::open(file.folder());
}

inline block_streamer::Tokenizer tokenizer_named(const std::string& name) {
  return block_streamer::Tokenizer::open(folder() / (name + ".json"));
}

/// The folder of SmolLM2, or nothing with the reason printed.
inline std::optional<std::filesystem::path> smollm2() {
  const char* named = std::getenv("BLOCK_STREAMER_SMOLLM2");
  const std::filesystem::path path = named != nullptr ? named : BLOCK_STREAMER_SMOLLM2_FOLDER;
  if (std::filesystem::exists(path / "tokenizer.json")) return path;
  std::cerr << "skipped: no tokenizer.json in " << path
            << " (set BLOCK_STREAMER_SMOLLM2 to the folder of SmolLM2-135M-Instruct)\n";
  return std::nullopt;
}

/// The result of `call`'s exception of type E, or "no error".
template <typename E, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

inline bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace text_fixtures
