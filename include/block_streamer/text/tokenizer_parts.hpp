// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/text/added_tokens.hpp>
#include <block_streamer/text/bpe.hpp>
#include <block_streamer/text/decoder.hpp>
#include <block_streamer/text/pre_tokenizer.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace block_streamer::inline v1 {

/// What a tokenizer file describes, checked and ready to use.
struct TokenizerParts {
  std::string path;  ///< of the file, for messages
  Bpe model;
  std::vector<AddedToken> added;  ///< `content` as it is searched, in the file's order
  bool normalize_nfc = false;
  PreTokenizer pre_tokenizer;
  std::vector<std::int32_t> before, after;  ///< special tokens around an encoded text
  Decoder decoder;
};

}  // namespace block_streamer::inline v1
