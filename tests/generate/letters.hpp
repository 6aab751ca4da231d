// SPDX-License-Identifier: Apache-2.0
// A tokenizer whose ids 0 to 88 are the characters from '!' to 'y', and ids of raw bytes above.
#pragma once

#include <block_streamer/text/tokenizer.hpp>

#include <support/safetensors_files.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace block_streamer_test {

inline constexpr int letter_count = 89;
/// The first bytes of "é" (C3 A9) in the byte alphabet.
inline constexpr std::int32_t first_byte_id = 89;
inline constexpr std::int32_t second_byte_id = 90;
inline constexpr std::int32_t special_id = 91;

inline block_streamer::Tokenizer letters() {
  std::string vocabulary;
  for (int i = 0; i < letter_count; ++i) {
    const char c = static_cast<char>('!' + i);
    vocabulary += std::string{"\""} + (c == '"' || c == '\\' ? "\\" : "") + c +
                  "\":" + std::to_string(i) + ",";
  }
  vocabulary += "\"\u00c3\":89,\"\u00a9\":90";
  const support::TempFolder folder;
  support::write_text(
      folder / "tokenizer.json",
      R"({"version":"1.0","added_tokens":[{"id":91,"content":"<|end|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},"post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":"","end_of_word_suffix":"","fuse_unk":false,"byte_fallback":false,"ignore_merges":false,"vocab":{)" +
          vocabulary + R"(},"merges":[]}})");
  return block_streamer::Tokenizer::open(folder.path());
}

inline std::vector<std::int32_t> ids_of(std::string_view text) {
  std::vector<std::int32_t> ids;
  for (const char c : text) ids.push_back(c - '!');
  return ids;
}

}  // namespace block_streamer_test
