// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/block/replayable_context.hpp>
#include <block_streamer/core/error.hpp>
#include <block_streamer/core/ids.hpp>
#include <block_streamer/plan/repeated_plan.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace block_streamer::inline v1::detail {

/// `target` is what a clone of `tensor` would be, but for the values.
[[nodiscard]] inline bool is_like(const at::Tensor& target, const at::Tensor& tensor) {
  if (!target.defined() || !tensor.defined()) return target.defined() == tensor.defined();
  if (target.scalar_type() != tensor.scalar_type() || target.sizes() != tensor.sizes() ||
      target.device() != tensor.device()) {
    return false;
  }
  return tensor.is_non_overlapping_and_dense() ? target.strides() == tensor.strides()
                                               : target.is_contiguous();
}

[[nodiscard]] inline std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// @throws UnsupportedError saying why no pass of the run can be recorded.
template <class Graph, class Run>
void expect_recordable(Run& run) {
  const std::string name = "passes on " + run.device_name() + " cannot be recorded in a graph: ";
  if (!Graph::supported) throw UnsupportedError{name + "the device has none"};
  const std::string why = run.pipeline().why_not_recorded();
  if (!why.empty()) throw UnsupportedError{name + why};
}
/// @throws UnsupportedError if no recorded pass can serve this context again.
template <class Context>
void expect_replayable([[maybe_unused]] const Context& context) {
  if constexpr (replayable_context<Context>) {
    if (context.replays_as(context)) return;
    throw UnsupportedError{
        "a pass with this context cannot be recorded in a graph: from pass to pass it changes in "
        "more than values of tensors, as with a KV cache"};
  }
}

/// What the context names as replayed; nothing, if it is of another kind.
template <class Context>
[[nodiscard]] std::vector<at::Tensor*> replayed_of([[maybe_unused]] Context& context) {
  if constexpr (replayable_context<Context>) {
    return context.replayed();
  } else {
    return {};
  }
}
/// Gives the context tensors of its own.
template <class Context>
void own_replayed(Context& context) {
  for (at::Tensor* tensor : replayed_of(context)) {
    if (tensor->defined()) *tensor = tensor->detach().clone();
  }
}
/// A pass recorded with `own` serves `given`, once it has its values.
template <class Context>
[[nodiscard]] bool is_like_context(Context& own, Context& given) {
  if constexpr (replayable_context<Context>) {
    if (!own.replays_as(given)) return false;
  }
  const auto places = replayed_of(own), values = replayed_of(given);
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (!is_like(*places[i], *values[i])) return false;
  }
  return true;
}
template <class Context>
void load_replayed(Context& own, Context& given) {
  const auto places = replayed_of(own), values = replayed_of(given);
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i]->defined()) places[i]->copy_(*values[i], /*non_blocking=*/true);
  }
}

/// Keeps `where` on the block that is recorded, and looks after each whether the recording lives.
template <class Run, class Graph>
[[nodiscard]] typename Run::RecordedWalks::Watch watch(std::string& where, const Graph& graph) {
  return {[&where](BlockId block) { where = "block " + std::to_string(index_of(block)); },
          [&where, &graph, whole = where](BlockId) {
            graph.expect_recording();
            where = whole;
          }};
}

/// Records what `work` enqueues, which the plan made ready for.
/// @param random  as DeviceGraph::record takes it.
/// @throws UnsupportedError saying `where` the recording was when it failed.
template <class Run, class Graph, class Work>
void record_pass(Run& run, Graph& graph, const RepeatedPlan& plan, const std::string& where,
                 Work&& work, typename Graph::RepeatedRandom* random = nullptr) {
  try {
    graph.record(work, random);
  } catch (const std::exception& error) {
    run.pipeline().end_recording(plan, /*failed=*/true);
    throw UnsupportedError{where + " cannot be recorded in a graph of " + run.device_name() + ": " +
                           first_line(error.what())};
  } catch (...) {
    run.pipeline().end_recording(plan, /*failed=*/true);
    throw;
  }
  run.pipeline().end_recording(plan, /*failed=*/false);
}

/// @brief Recordings of a few shapes, the one that was not used for longest making way.
/// @tparam Recorded  with `is_current()`.
template <class Recorded>
class LatestRecordings {
 public:
  explicit LatestRecordings(std::size_t most) : most_{most} {}

  /// @brief The one that `serves(recorded)`, or what `make()` makes: a unique_ptr.
  template <class Serves, class Make>
  [[nodiscard]] Recorded& find_or_make(Serves&& serves, Make&& make) {
    std::erase_if(all_, [](const auto& one) { return !one->is_current(); });
    const auto found =
        std::find_if(all_.begin(), all_.end(), [&](const auto& one) { return serves(*one); });
    if (found != all_.end()) {
      std::rotate(found, found + 1, all_.end());  // the latest
      return *all_.back();
    }
    if (all_.size() == most_) all_.erase(all_.begin());
    all_.push_back(make());
    ++made_;
    return *all_.back();
  }
  /// @brief So far, those that were given up included.
  [[nodiscard]] std::size_t made_count() const noexcept { return made_; }

 private:
  std::size_t most_;
  std::vector<std::unique_ptr<Recorded>> all_;  ///< the latest used last
  std::size_t made_ = 0;
};

}  // namespace block_streamer::inline v1::detail
