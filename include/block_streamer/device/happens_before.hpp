// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// Whoever performs operations in an order of its own: a stream, a host thread, a drive.
enum class ActorId : std::uint32_t {};

/// @brief What is known of every actor's progress: entry a is the time up to which a's operations
/// happened before. Missing entries are 0, and times start at 1, so nothing is known by default.
class VectorClock {
 public:
  [[nodiscard]] std::uint64_t operator[](ActorId actor) const noexcept {
    const auto index = static_cast<std::size_t>(actor);
    return index < times_.size() ? times_[index] : 0;
  }
  void advance(ActorId actor) {
    const auto index = static_cast<std::size_t>(actor);
    if (index >= times_.size()) times_.resize(index + 1);
    ++times_[index];
  }
  /// @brief From now on what `other` knows is known here as well.
  void join(const VectorClock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
    for (std::size_t i = 0; i < other.times_.size(); ++i) {
      times_[i] = std::max(times_[i], other.times_[i]);
    }
  }

 private:
  std::vector<std::uint64_t> times_;
};

/// @brief The happens-before relation between actors, by vector clocks.
/// An edge from a to b is `acquire(b, release(a))`: what a did before the release happened before
/// what b does after the acquire. An actor's own operations are ordered.
/// **Threads.** None of its own; the owner locks. **Cost.** Linear in the number of actors, which
/// only grows.
class HappensBefore {
 public:
  ActorId add_actor(std::string name) {
    const auto actor = static_cast<ActorId>(actors_.size());
    actors_.push_back({std::move(name), {}});
    actors_.back().clock.advance(actor);
    return actor;
  }
  void rename(ActorId actor, std::string name) { at(actor).name = std::move(name); }
  [[nodiscard]] const std::string& name(ActorId actor) const { return at(actor).name; }
  [[nodiscard]] const VectorClock& clock(ActorId actor) const { return at(actor).clock; }
  /// The time of an operation that `actor` performs now.
  [[nodiscard]] std::uint64_t time(ActorId actor) const { return at(actor).clock[actor]; }

  /// @returns what `actor` knows now, its own operations so far included; later ones are not.
  [[nodiscard]] VectorClock release(ActorId actor) {
    VectorClock published = at(actor).clock;
    at(actor).clock.advance(actor);
    return published;
  }
  void acquire(ActorId actor, const VectorClock& published) { at(actor).clock.join(published); }
  void edge(ActorId from, ActorId to) { acquire(to, release(from)); }

 private:
  struct Actor {
    std::string name;
    VectorClock clock;
  };
  [[nodiscard]] Actor& at(ActorId actor) { return actors_.at(static_cast<std::size_t>(actor)); }
  [[nodiscard]] const Actor& at(ActorId actor) const {
    return actors_.at(static_cast<std::size_t>(actor));
  }
  std::vector<Actor> actors_;
};

}  // namespace block_streamer::inline v1
