// SPDX-License-Identifier: Apache-2.0
// Any text as model.safetensors.index.json: refused, or it names plain files only.
#include <block_streamer/checkpoint/checkpoint_index.hpp>

#include "fuzz_input.hpp"

namespace bs = block_streamer;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::refuses_or_accepts([&] {
    const auto index = bs::parse_checkpoint_index("index.json", fuzz::text_of(data, size));
    fuzz::require(!index.file_of.empty(), "an index without a tensor");
    for (const auto& [tensor, file] : index.file_of) {
      const std::filesystem::path path{file};
      fuzz::require(path.filename() == path && path != "." && path != "..",
                    "an index reaches out of its folder");
      fuzz::require(file.find('\0') == std::string::npos, "a file name with a zero byte");
    }
  });
  return 0;
}
