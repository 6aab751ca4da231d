// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer_benchmarks {

/// @brief Numbers with something between them: "128,2048", "8x2048".
[[nodiscard]] inline std::vector<std::int64_t> numbers_in(const std::string& text, char separator) {
  std::vector<std::int64_t> numbers;
  std::istringstream in{text};
  for (std::string word; std::getline(in, word, separator);) numbers.push_back(std::stoll(word));
  return numbers;
}

/// @brief The benchmark's own options, taken out of the command line before Google Benchmark sees
/// it: "--name", "--name value" or "--name=value".
class Arguments {
 public:
  Arguments(int argc, char** argv) : words_{argv, argv + argc} {}

  [[nodiscard]] bool flag(std::string_view name) {
    for (std::size_t i = 1; i < words_.size(); ++i) {
      if (words_[i] != name) continue;
      words_.erase(words_.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    }
    return false;
  }
  [[nodiscard]] std::string text(std::string_view name, std::string otherwise) {
    const std::string with_value = std::string{name} + "=";
    for (std::size_t i = 1; i < words_.size(); ++i) {
      const std::string word = words_[i];
      const auto at = words_.begin() + static_cast<std::ptrdiff_t>(i);
      if (word.starts_with(with_value)) {
        words_.erase(at);
        return word.substr(with_value.size());
      }
      if (word != name) continue;
      if (i + 1 == words_.size()) throw std::invalid_argument{word + " needs a value"};
      std::string value = words_[i + 1];
      words_.erase(at, at + 2);
      return value;
    }
    return otherwise;
  }
  [[nodiscard]] std::size_t number(std::string_view name, std::size_t otherwise) {
    const std::string value = text(name, std::to_string(otherwise));
    char* end = nullptr;
    const unsigned long long number = std::strtoull(value.c_str(), &end, 10);
    if (end == value.c_str() || *end != '\0') {
      throw std::invalid_argument{std::string{name} + ": '" + value + "' is no number"};
    }
    return static_cast<std::size_t>(number);
  }

  /// @brief What is left, for benchmark::Initialize. **Lifetime.** This object's.
  [[nodiscard]] std::vector<char*> rest() {
    std::vector<char*> pointers;
    for (std::string& word : words_) pointers.push_back(word.data());
    return pointers;
  }

 private:
  std::vector<std::string> words_;
};

}  // namespace block_streamer_benchmarks
