// SPDX-License-Identifier: Apache-2.0
// Any bytes as a safetensors file: refused, or every claim of the header holds.
#include <block_streamer/checkpoint/safetensors_header.hpp>

#include "fuzz_input.hpp"

namespace bs = block_streamer;

namespace {

void check(const bs::SafetensorsHeader& header, std::uint64_t file_size) {
  fuzz::require(header.file_byte_count == file_size, "the size of the file is wrong");
  std::uint64_t covered = 0;
  for (const bs::StoredTensor& tensor : header.tensors) {
    fuzz::require(tensor.range.offset <= file_size &&
                      tensor.range.byte_count <= file_size - tensor.range.offset,
                  "a tensor reaches beyond the file");
    fuzz::require(
        bs::dense_byte_count(tensor.spec.dtype, tensor.spec.shape) == tensor.range.byte_count,
        "a tensor's range is not what its shape takes");
    covered += tensor.range.byte_count;
  }
  for (const bs::UnsupportedTensor& tensor : header.unsupported) {
    fuzz::require(tensor.range.end() <= file_size, "a tensor reaches beyond the file");
    covered += tensor.range.byte_count;
  }
  fuzz::require(covered <= file_size - 8, "tensors overlap");
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static fuzz::MemoryFile file;
  file.fill(fuzz::text_of(data, size));
  fuzz::refuses_or_accepts([&] { check(bs::read_safetensors_header(file.path()), size); });
  return 0;
}
