// SPDX-License-Identifier: Apache-2.0
// Any text as tokenizer.json: refused, or a text goes through it and back.
#include <block_streamer/text/tokenizer.hpp>

#include "fuzz_input.hpp"

namespace bs = block_streamer;

namespace {

void use(const bs::Tokenizer& tokenizer) {
  const std::string text = "abc  Ab1<e>\n\xC3\xA9 \xF0\x9F\x99\x82'll";
  const std::vector<std::int32_t> ids = tokenizer.encode(text);
  for (const std::int32_t id : ids) {
    fuzz::require(id >= 0 && static_cast<std::size_t>(id) < tokenizer.vocabulary_size(),
                  "an id beyond the vocabulary");
  }
  static_cast<void>(tokenizer.decode(ids));
  static_cast<void>(tokenizer.decode(ids, false));
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static fuzz::MemoryFile file;
  file.fill(fuzz::text_of(data, size));
  fuzz::refuses_or_accepts([&] { use(bs::Tokenizer::open(file.path())); });
  return 0;
}
