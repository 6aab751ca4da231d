// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/device/access_checker.hpp>
#include <block_streamer/device/execution_backend.hpp>
#include <block_streamer/device/host_edges.hpp>
#include <block_streamer/device/violation_log.hpp>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace block_streamer::inline v1 {

/// What a CheckedBackend looks for besides the order of accesses.
struct CheckOptions {
  /// The host side of every copy must lie in one live HostRegistration: a copy from pageable memory
  /// makes a device wait, and so hides missing events.
  bool require_registration = true;
  /// Memory is released, or its registration ended, only by a host thread that comes after every
  /// access to it.
  bool check_release = true;
};

namespace detail {
/// Gives CheckedBackend a NativeStream exactly where the checked backend has one.
template <class B>
struct BorrowedStreams {};
template <borrowed_stream_backend B>
struct BorrowedStreams<B> {
  using NativeStream = typename B::NativeStream;
  std::vector<std::pair<NativeStream, ActorId>> actors;  ///< one native stream is one actor
};
template <class B>
struct NativeStreamOf {};
template <borrowed_stream_backend B>
struct NativeStreamOf<B> {
  using NativeStream = typename B::NativeStream;
};
}  // namespace detail

/// @brief Decorates a backend and proves that accesses are ordered, whatever the timing of this
/// run: every stream and host thread is an actor with a vector clock, and an access that conflicts
/// with an earlier one without a happens-before edge is written to `log()`.
/// **Edges.** Operations of one stream in order; a host thread to what it enqueues; record to wait,
/// synchronize, a query that returned true, and the completion of notify; `host_release` to
/// `host_acquire` (mutexes between host threads are invisible: @see host_edges.hpp). A thread that
/// was never seen comes after nobody.
/// **Accesses.** copy_async reads and writes on its stream; touch_on_stream and touch_on_host
/// declare the rest, a drive's writes by the threads that issue and complete the read.
/// It does what the backend does, and so throws what it throws; the log needs no exception.
/// **Threads.** As the backend; one mutex around each enqueueing. **Cost.** For tests.
template <execution_backend B>
class CheckedBackend : public detail::NativeStreamOf<B> {
  struct Shared : detail::AccessChecker, detail::BorrowedStreams<B> {
    explicit Shared(CheckOptions o) : AccessChecker{ViolationLog{}}, options{o} {}
    const CheckOptions options;
  };
  using Session = detail::AccessChecker::Session;

 public:
  class Stream {
   public:
    /// The stream of the checked backend, for what only it can do.
    [[nodiscard]] typename B::Stream& inner() noexcept { return inner_; }

   private:
    friend class CheckedBackend;
    Stream(typename B::Stream inner, ActorId actor) : inner_{std::move(inner)}, actor_{actor} {}
    typename B::Stream inner_;
    ActorId actor_;
  };

  class Event {
   public:
    [[nodiscard]] typename B::Event& inner() noexcept { return inner_; }

   private:
    friend class CheckedBackend;
    explicit Event(typename B::Event inner) : inner_{std::move(inner)} {}
    typename B::Event inner_;
    std::optional<VectorClock> recorded_;  // guarded by the checker
  };

 private:
  /// Watches a range until it is destroyed; says so to the checker before `Inner` lets go.
  template <class Inner, bool is_registration>
  class Watched {
   public:
    Watched(Inner inner, std::span<const std::byte> bytes, std::shared_ptr<Shared> shared)
        : inner_{std::move(inner)}, bytes_{bytes}, shared_{std::move(shared)} {
      Session session{*shared_};
      if constexpr (is_registration) {
        session.add_registration(bytes_);  // its content was there before, and so were accesses
      } else {
        session.forget(bytes_);
      }
    }
    Watched(Watched&&) noexcept = default;
    Watched& operator=(Watched&& other) noexcept {
      if (this != &other) {
        finish();
        inner_ = std::move(other.inner_);
        bytes_ = other.bytes_;
        shared_ = std::move(other.shared_);
      }
      return *this;
    }
    ~Watched() { finish(); }

   private:
    friend class CheckedBackend;
    void finish() noexcept {
      if (!shared_) return;
      Session session{*shared_};
      if (shared_->options.check_release) {
        session.access(session.this_thread(), bytes_, Access::write,
                       is_registration ? "end of a registration" : "release of device memory");
      }
      session.forget(bytes_);
      if constexpr (is_registration) session.drop_registration(bytes_);
    }
    Inner inner_;
    std::span<const std::byte> bytes_;
    std::shared_ptr<Shared> shared_;
  };

 public:
  using DeviceBuffer = Watched<typename B::DeviceBuffer, false>;
  using HostRegistration = Watched<typename B::HostRegistration, true>;

  explicit CheckedBackend(B inner = B{}, CheckOptions options = {})
      : inner_{std::move(inner)}, shared_{std::make_shared<Shared>(options)} {}

  [[nodiscard]] ViolationLog log() const { return shared_->log(); }
  [[nodiscard]] B& inner() noexcept { return inner_; }
  /// @brief How messages call the stream, e.g. "copy stream".
  void label(Stream& stream, const std::string& name) {
    Session{*shared_}.order().rename(stream.actor_, name);
  }
  /// @brief How messages call the calling thread.
  void label_this_thread(const std::string& name) {
    Session session{*shared_};
    session.order().rename(session.this_thread(), name);
  }

  [[nodiscard]] DeviceBuffer allocate_device(std::size_t byte_count) {
    auto buffer = inner_.allocate_device(byte_count);
    const auto memory = inner_.bytes(buffer);
    return {std::move(buffer), memory, shared_};
  }
  [[nodiscard]] std::span<std::byte> bytes(const DeviceBuffer& buffer) const noexcept {
    return inner_.bytes(buffer.inner_);
  }
  [[nodiscard]] std::optional<HostRegistration> register_host(std::span<std::byte> memory) {
    auto registration = inner_.register_host(memory);
    if (!registration) return std::nullopt;
    return HostRegistration{std::move(*registration), memory, shared_};
  }
  [[nodiscard]] bool host_addressable() const noexcept { return inner_.host_addressable(); }

  [[nodiscard]] Stream make_stream() {
    auto stream = inner_.make_stream();
    return {std::move(stream), Session{*shared_}.add_stream()};
  }
  template <class Native, class Inner = B>  // clang 14 looks into a constraint without parameters
  requires(borrowed_stream_backend<Inner>&& std::same_as<Native, typename Inner::NativeStream>)
      [[nodiscard]] Stream borrow_stream(Native native) {
    Session session{*shared_};
    for (const auto& [known, actor] : shared_->actors) {
      if (known == native) return {inner_.borrow_stream(native), actor};
    }
    const ActorId actor = session.add_stream();
    shared_->actors.emplace_back(native, actor);
    return {inner_.borrow_stream(native), actor};
  }
  [[nodiscard]] Event make_event() { return Event{inner_.make_event()}; }

  void record(Event& event, Stream& stream) {
    Session session{*shared_};
    inner_.record(event.inner_, stream.inner_);
    session.enqueue_on(stream.actor_);
    event.recorded_ = session.order().release(stream.actor_);
  }
  void wait(Stream& stream, Event& event) {
    Session session{*shared_};
    if (!event.recorded_) session.report_never_recorded(stream.actor_, "wait");
    inner_.wait(stream.inner_, event.inner_);
    session.enqueue_on(stream.actor_);
    if (event.recorded_) session.order().acquire(stream.actor_, *event.recorded_);
  }
  [[nodiscard]] bool query(Event& event) {
    const VectorClock recorded = clock_of(event, "query");
    const bool passed = inner_.query(event.inner_);
    if (passed) accept(recorded);
    return passed;
  }
  void synchronize(Event& event) {
    const VectorClock recorded = clock_of(event, "synchronize");
    inner_.synchronize(event.inner_);
    accept(recorded);
  }
  void notify(Event& event, IoCompletion reached) {
    inner_.notify(event.inner_,
                  [checker = shared_, recorded = clock_of(event, "notify"),
                   reached = std::move(reached)](std::error_code error, std::size_t n) mutable {
                    if (!error) {
                      Session session{*checker};
                      session.order().acquire(session.this_thread(), recorded);
                    }
                    reached(error, n);
                  });
  }

  void copy_async(std::span<std::byte> to, std::span<const std::byte> from, CopyDirection direction,
                  Stream& stream) {
    Session session{*shared_};
    inner_.copy_async(to, from, direction, stream.inner_);
    session.enqueue_on(stream.actor_);
    if (to.empty()) return;
    session.access(stream.actor_, from, Access::read, "copy_async reads");
    session.access(stream.actor_, to, Access::write, "copy_async writes");
    if (!shared_->options.require_registration) return;
    if (direction == CopyDirection::host_to_device) {
      session.require_registered(stream.actor_, from, "copy_async reads");
    } else if (direction == CopyDirection::device_to_host) {
      session.require_registered(stream.actor_, to, "copy_async writes");
    }
  }

  void touch_on_stream(std::span<const std::byte> bytes, Access kind, Stream& stream) noexcept {
    Session session{*shared_};
    inner_.touch_on_stream(bytes, kind, stream.inner_);
    session.enqueue_on(stream.actor_);
    session.access(stream.actor_, bytes, kind,
                   kind == Access::read ? "a kernel's read" : "a kernel's write");
  }
  void touch_on_host(std::span<const std::byte> bytes, Access kind) noexcept {
    Session session{*shared_};
    inner_.touch_on_host(bytes, kind);
    session.access(session.this_thread(), bytes, kind,
                   kind == Access::read ? "the host's read" : "the host's write");
  }

  void host_release(const void* tag) noexcept { Session{*shared_}.release_tag(tag); }
  void host_acquire(const void* tag) noexcept { Session{*shared_}.acquire_tag(tag); }
  /// @brief Host memory without a registration has a new owner.
  void forget(std::span<const std::byte> memory) noexcept { Session{*shared_}.forget(memory); }

  /// Where the checked backend can hold a stream, so can this one.
  void pause(Stream& stream) requires requires(B& b, typename B::Stream& s) { b.pause(s); }
  { inner_.pause(stream.inner_); }
  void resume(Stream& stream) requires requires(B& b, typename B::Stream& s) { b.resume(s); }
  { inner_.resume(stream.inner_); }

  [[nodiscard]] Nanoseconds now() const noexcept { return inner_.now(); }
  [[nodiscard]] std::string name() const { return inner_.name(); }

 private:
  VectorClock clock_of(Event& event, std::string_view operation) {
    Session session{*shared_};
    if (event.recorded_) return *event.recorded_;
    session.report_never_recorded(session.this_thread(), operation);
    return {};
  }
  void accept(const VectorClock& recorded) {
    Session session{*shared_};
    session.order().acquire(session.this_thread(), recorded);
  }

  B inner_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace block_streamer::inline v1
