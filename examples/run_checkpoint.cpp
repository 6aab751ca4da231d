// SPDX-License-Identifier: Apache-2.0
// Runs a checkpoint of which two blocks at a time are in memory. README.md shows it whole.
// [program]
#include <ATen/ops/tensor.h>

#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/models/llama.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/streamer.hpp>

#include <cstdint>
#include <exception>
#include <iostream>

namespace bs = block_streamer;

int main(int argc, char** argv) try {
  const char* folder = argc > 1 ? argv[1] : "models/SmolLM2-135M-Instruct";
  auto checkpoint = bs::Checkpoint::open(folder);  // headers only, every byte range checked
  auto model = bs::models::Llama{checkpoint};      // block list + resident embedding, norm, head
  bs::Streamer streamer{
      model.blocks(), bs::FileStorage{model.block_map()}, bs::HostBackend{}, {.prefetch_ahead = 1}};

  at::Tensor ids = at::tensor({1, 2, 3, 4}, at::kLong).unsqueeze(0);           // (B,T)
  at::Tensor hidden = streamer.forward(model.embed(ids), model.context(ids));  // (B,T,C)
  at::Tensor logits = model.logits(hidden);                                    // (B,T,V)
  std::cout << "next token: " << logits[0][-1].argmax().item<std::int64_t>() << ", at most "
            << streamer.statistics().peak_resident_blocks << " of " << streamer.block_count()
            << " blocks were resident\n";
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
// [/program]
