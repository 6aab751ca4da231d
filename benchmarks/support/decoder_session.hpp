// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "random_decoder.hpp"

#include <block_streamer/core/byte_range.hpp>
#include <block_streamer/optim/external_optimizer.hpp>
#include <block_streamer/streamer.hpp>

#include <chrono>
#include <cstddef>
#include <optional>

namespace block_streamer_benchmarks {

/// @brief A random decoder, at most one streamer over it, and the clock around what both do.
template <class Side>
class DecoderSession {
 public:
  using Streamer = bs::Streamer<bs::models::DecoderBlock, BorrowedRam, bs::ExternalOptimizer,
                                typename Side::Backend>;

  DecoderSession(Side& side, const RandomDecoderOptions& options)
      : side_{side}, decoder_{side, options} {}

  [[nodiscard]] RandomDecoder<Side>& decoder() noexcept { return decoder_; }

  /// @brief The streamer with a budget of so many blocks beyond its two slots. Another number makes
  /// a new one: each page-locks the weights, so there is one at a time.
  [[nodiscard]] Streamer& streamer(std::size_t cached,
                                   bs::ActivationPlace activations = bs::ActivationPlace::device) {
    if (streamer_ && cached_ == cached) return *streamer_;
    streamer_.reset();
    bs::StreamerOptions options;
    options.prefetch_ahead = 1;
    options.device_budget = cached * bs::round_up(decoder_.block_bytes(), bs::tensor_alignment);
    options.activations.place = activations;
    streamer_.emplace(decoder_.blocks(), BorrowedRam{decoder_.storage()}, side_.backend(), options);
    cached_ = cached;
    return *streamer_;
  }

  /// @pre streamer() was called.
  [[nodiscard]] Streamer& current() noexcept { return *streamer_; }

  /// @brief Waits for everything that was begun.
  void settle() {
    if (streamer_) streamer_->drain();
    side_.synchronize();
  }
  template <class Work>
  [[nodiscard]] double seconds_of(Work&& work) {
    settle();
    const auto begin = std::chrono::steady_clock::now();
    work();
    settle();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  Side& side_;
  RandomDecoder<Side> decoder_;
  std::optional<Streamer> streamer_;  // after the decoder: it uses its storage
  std::size_t cached_ = 0;
};

}  // namespace block_streamer_benchmarks
