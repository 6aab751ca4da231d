// SPDX-License-Identifier: Apache-2.0
// Any text as adapter_config.json: refused, or what was read is written and read again the same.
#include <block_streamer/checkpoint/peft_config.hpp>

#include "fuzz_input.hpp"

namespace bs = block_streamer;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::refuses_or_accepts([&] {
    const auto config = bs::parse_peft_config("adapter_config.json", fuzz::text_of(data, size));
    const std::string written = bs::format_peft_config(config);
    try {
      const auto again = bs::parse_peft_config("adapter_config.json", written);
      fuzz::require(bs::format_peft_config(again) == written, "written and read, it differs");
    } catch (const bs::Error& error) {
      fuzz::finding(std::string{"what was written is refused: "} + error.what());
    }
  });
  return 0;
}
