// SPDX-License-Identifier: Apache-2.0
// Everything that a program with LibTorch uses on the host; a GPU needs device/cuda_backend.hpp and
// block/stream_bridge_cuda.hpp besides. Each header can be included alone instead, which
// compiles faster.
#pragma once

#include <block_streamer/block/any_block.hpp>
#include <block_streamer/block/function_block.hpp>
#include <block_streamer/block/master_storage.hpp>
#include <block_streamer/block/module_block.hpp>
#include <block_streamer/block/stored_blocks.hpp>
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/finetune/evaluation.hpp>
#include <block_streamer/finetune/training_loop.hpp>
#include <block_streamer/generate/text_generator.hpp>
#include <block_streamer/lora/lora_adapter.hpp>
#include <block_streamer/lora/lora_linear.hpp>
#include <block_streamer/lora/peft_files.hpp>
#include <block_streamer/lora/peft_loading.hpp>
#include <block_streamer/models/llama.hpp>
#include <block_streamer/models/qwen3.hpp>
#include <block_streamer/optim/adamw.hpp>
#include <block_streamer/optim/gradient_norm.hpp>
#include <block_streamer/optim/sgd.hpp>
#include <block_streamer/storage/async_read.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/storage/mapped_storage.hpp>
#include <block_streamer/storage/ram_storage.hpp>
#include <block_streamer/streamer.hpp>
#include <block_streamer/text/chat_template.hpp>
#include <block_streamer/text/text_dataset.hpp>
#include <block_streamer/text/tokenizer.hpp>
#include <block_streamer/trace/perfetto_writer.hpp>
#include <block_streamer/train/chunked_loss.hpp>
