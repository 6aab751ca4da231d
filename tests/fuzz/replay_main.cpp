// SPDX-License-Identifier: Apache-2.0
// A fuzz target without a fuzzer: runs it once for each file of the folders given, so that the
// seeds and all inputs that ever were a finding are tests of any build.
#include "fuzz_input.hpp"

#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator{argv[i]}) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
  }
  if (files.empty()) {
    std::fprintf(stderr, "usage: %s FOLDER…   (no file is there)\n", argv[0]);
    return 2;
  }
  std::sort(files.begin(), files.end());
  for (const std::filesystem::path& path : files) {
    std::ifstream in{path, std::ios::binary};
    const std::string text{std::istreambuf_iterator<char>{in}, {}};
    // A copy of the exact size: reading beyond it is then seen by a sanitizer.
    const auto bytes = std::make_unique<std::uint8_t[]>(text.size());
    std::copy(text.begin(), text.end(), bytes.get());
    std::fprintf(stderr, "%s\n", path.filename().string().c_str());
    LLVMFuzzerTestOneInput(bytes.get(), text.size());
  }
  std::printf("%zu inputs\n", files.size());
  return 0;
}
