// SPDX-License-Identifier: Apache-2.0
// Any text as config.json and, behind a byte 0x1e, as generation_config.json.
#include <block_streamer/architecture/decoder_tensors.hpp>
#include <block_streamer/checkpoint/model_config.hpp>

#include "fuzz_input.hpp"

namespace bs = block_streamer;

namespace {

void check(const bs::ModelConfig& config) {
  fuzz::require(config.layer_count > 0 && config.hidden_size > 0 && config.vocabulary_size > 0,
                "a size is 0");
  for (const bs::ExpectedTensor& tensor : bs::decoder_block_tensors(config)) {
    fuzz::require(!tensor.name.empty(), "a tensor without a name");
    static_cast<void>(bs::dense_byte_count(bs::DType::f32, tensor.shape));
  }
  for (const std::uint64_t id : config.eos_ids) {
    fuzz::require(id < config.vocabulary_size, "an id beyond the vocabulary");
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static fuzz::ScratchFolder folder;
  const std::string_view text = fuzz::text_of(data, size);
  const std::size_t cut = text.find('\x1e');
  folder.write("config.json", text.substr(0, cut));
  if (cut == std::string_view::npos) {
    folder.remove("generation_config.json");
  } else {
    folder.write("generation_config.json", text.substr(cut + 1));
  }
  fuzz::refuses_or_accepts([&] {
    std::vector<std::string> warnings;
    check(bs::read_model_config(folder.path(), warnings));
  });
  return 0;
}
