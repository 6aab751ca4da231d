// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/capture/captured_pass.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

struct CaptureOptions {
  /// Shapes whose recorded passes are kept; another takes the place of the one that was not used
  /// for longest.
  std::size_t shapes = 4;
};

/// @brief Forwards of a streamer in evaluation mode, replayed from graphs of the device: the host
/// enqueues one graph instead of every copy and kernel. Pays where launching kernels takes longer
/// than running them. The first forward of a shape (sizes, strides, types, autocast) runs the list
/// once and records it; so does the first one after the streamer was closed, converted or given
/// other adapters.
/// Made by Streamer::capture(). @see CapturedPass for what may change between replays.
/// **Threads.** Externally synchronised with the streamer.
/// **Lifetime.** Shares the streamer's core. Results are the caller's own.
/// **Cost.** For each shape what one pass allocates on the device; a copy of the input and one of
/// the result a forward (@see pass for neither).
template <streamable_block Block, execution_backend Backend>
class CapturedForward {
 public:
  using Pass = CapturedPass<Block, Backend>;
  using Run = typename Pass::Run;
  using Hidden = typename Block::Hidden;
  using Context = typename Block::Context;
  using Result = ResultOf<Block>;

  /// @param context  what the blocks get where a forward names no other: kept as it is now, so
  /// what is in it besides tensors must not change from pass to pass.
  /// @throws UnsupportedError saying why no pass of this streamer can be recorded.
  CapturedForward(std::shared_ptr<Run> run, Context context, CaptureOptions options)
      : run_{std::move(run)}, context_{std::move(context)}, passes_{options.shapes} {
    expects(options.shapes > 0, "a captured forward keeps at least one shape");
    detail::expect_recordable<typename Pass::Graph>(*run_);
    side_ =
        std::make_unique<typename Pass::Graph::Side>(run_->pipeline().backend(), run_->device());
  }

  /// @brief What Streamer::forward gives in evaluation mode, bit for bit; without a graph of
  /// gradients.
  /// @throws UnsupportedError naming the block that cannot be recorded, whenever it is tried; the
  /// streamer stays usable. What a forward throws.
  [[nodiscard]] Result forward(const Hidden& input) {
    return pass_for(input, context_).forward(input, context_);
  }
  [[nodiscard]] Result forward(const Hidden& input,
                               Context& context) requires replayable_context<Context> {
    return pass_for(input, context).forward(input, context);
  }

  /// @brief The recorded pass for inputs like this one, for callers that write its input and read
  /// its output themselves, all on one stream. The input's values are not taken over.
  /// **Lifetime.** Until as many other shapes came as are kept, or the streamer changed.
  [[nodiscard]] Pass& pass(const Hidden& input) {
    Pass& found = pass_for(input, context_);
    if constexpr (replayable_context<Context>) found.load_context(context_);
    return found;
  }
  /// @brief Passes recorded so far, those that were given up included.
  [[nodiscard]] std::size_t recorded_count() const noexcept { return passes_.made_count(); }

 private:
  [[nodiscard]] Pass& pass_for(const Hidden& input, Context& context) {
    run_->check_input(input);
    const auto serves = [&](Pass& pass) {
      if constexpr (replayable_context<Context>) {
        return pass.serves(input, context);
      } else {
        return pass.serves(input);
      }
    };
    return passes_.find_or_make(serves, [&] {
      detail::expect_replayable(context);
      return std::make_unique<Pass>(run_, *side_, input, context);
    });
  }

  std::shared_ptr<Run> run_;
  Context context_;
  std::unique_ptr<typename Pass::Graph::Side> side_;
  detail::LatestRecordings<Pass> passes_;
};

}  // namespace block_streamer::inline v1
