// SPDX-License-Identifier: Apache-2.0
#include "fitting_adapter.hpp"
#include "merge_job.hpp"
#include "translated.hpp"

#include <block_streamer/architecture/model_layout.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/model_config.hpp>
#include <block_streamer/lora/merge.hpp>
#include <block_streamer/models/decoder_block.hpp>

#include <string>
#include <vector>

namespace bs = block_streamer;

namespace block_streamer_cli {

MergeSummary run_merge(const MergeJob& job) {
  return translated([&] {
    const bs::Checkpoint checkpoint = bs::Checkpoint::open(job.model);
    std::vector<std::string> ignored;
    const bs::ModelConfig config = bs::read_model_config(checkpoint.folder(), ignored);
    const bs::ModelLayout layout = bs::describe_model(config, checkpoint);
    std::vector<bs::LoraBlock> blocks;
    for (std::size_t i = 0; i < layout.blocks.size(); ++i) {
      blocks.push_back(
          {layout.blocks[i].prefix, bs::models::DecoderBlock{config, i}.weight_specs()});
    }
    const bs::LoraAdapter adapter =
        load_fitting_adapter(job.adapter, checkpoint.folder(), blocks, at::kCPU);
    const bs::MergeReport done =
        bs::merge_adapter(checkpoint, adapter, job.output,
                          {.shard_byte_count = job.shard_byte_count, .progress = job.progress});
    return MergeSummary{done.merged, done.kept, done.files, done.byte_count};
  });
}

}  // namespace block_streamer_cli
