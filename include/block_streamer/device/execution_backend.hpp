// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/io_completion.hpp>
#include <block_streamer/trace/trace_sink.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace block_streamer::inline v1 {

enum class CopyDirection : std::uint8_t { host_to_device, device_to_host, device_to_device };
enum class Access : std::uint8_t { read, write };

/// @brief One device: memory, queues, ordering. A backend is a cheap copyable handle; buffers,
/// streams, events and registrations are move-only owners that keep what they need alive, are
/// released by their destructors (noexcept) and are valid only with the backend (or a copy of it)
/// that made them.
/// **Threads.** Every call may come from any thread; two enqueue at once: the visitor and the I/O
/// loop. Operations of one stream run in the order of their enqueueing, whoever enqueued them.
/// **Errors.** Failures throw DeviceError; nothing is thrown after something was enqueued.
/// **Cost.** Everything not named `synchronize` returns without waiting for the device.
///
/// - `allocate_device(n)`: n bytes, 256-aligned (a null span for 0). `bytes(buffer)`: its device
///   address range; dereferenceable on the host only if `host_addressable()`.
/// - `register_host(memory)`: page-locks memory that somebody else owns and that outlives the
///   registration; nullopt where the system refuses. 0 bytes: an empty registration, no call.
/// - `record(event, stream)`, `wait(stream, event)`: the stream waits for the latest record, the
///   host does not. A later record changes nothing for who waits already.
/// - `query(event)`: true once the device passed the latest record. `synchronize(event)`: the only
///   host wait.
/// - `notify(event, reached)`: calls `reached` once the device passed the latest record, on any
///   thread, possibly before notify returns: hold no lock that `reached` takes. `reached` may call
///   the backend. An error code says that the device failed (`synchronize` then throws the reason)
///   or, std::errc::invalid_argument, that the event was never recorded; it is not thrown, since
///   the completion was handed over.
/// - wait, query and synchronize on an event that was never recorded: ContractViolation.
/// - `copy_async(to, from, direction, stream)`: flat copy of equal, disjoint ranges; host side
///   registered, alive and unchanged until an event recorded after it has been passed. 0 bytes: no
///   operation.
/// - `touch_on_stream`, `touch_on_host`: tell a checking backend of accesses that it cannot see;
///   no-ops elsewhere.
/// - `now()`: the clock of trace events. `name()`: "cpu", "cuda:0"; for messages.
template <class B>
concept execution_backend = std::copyable<B> && std::movable<typename B::Stream> &&
    std::movable<typename B::Event> && std::movable<typename B::DeviceBuffer> &&
    std::movable<typename B::HostRegistration> &&
    requires(B& backend, const B& constant_backend, std::size_t byte_count,
             std::span<std::byte> memory, std::span<const std::byte> source,
             typename B::Stream& stream, typename B::Event& event,
             const typename B::DeviceBuffer& buffer, IoCompletion reached) {
  { backend.allocate_device(byte_count) } -> std::same_as<typename B::DeviceBuffer>;
  { constant_backend.bytes(buffer) }
  noexcept->std::same_as<std::span<std::byte>>;
  { backend.register_host(memory) } -> std::same_as<std::optional<typename B::HostRegistration>>;
  { constant_backend.host_addressable() }
  noexcept->std::same_as<bool>;
  { backend.make_stream() } -> std::same_as<typename B::Stream>;
  { backend.make_event() } -> std::same_as<typename B::Event>;
  { backend.record(event, stream) } -> std::same_as<void>;
  { backend.wait(stream, event) } -> std::same_as<void>;
  { backend.query(event) } -> std::same_as<bool>;
  { backend.synchronize(event) } -> std::same_as<void>;
  { backend.notify(event, std::move(reached)) } -> std::same_as<void>;
  {
    backend.copy_async(memory, source, CopyDirection::host_to_device, stream)
    } -> std::same_as<void>;
  { backend.touch_on_stream(source, Access::read, stream) }
  noexcept->std::same_as<void>;
  { backend.touch_on_host(source, Access::write) }
  noexcept->std::same_as<void>;
  { constant_backend.now() }
  noexcept->std::same_as<Nanoseconds>;
  { constant_backend.name() } -> std::same_as<std::string>;
};

/// @brief A backend whose compute stream can be somebody else's (LibTorch's current stream): the
/// returned Stream does not own, and is valid while the native one is.
template <class B>
concept borrowed_stream_backend = execution_backend<B> &&
    requires(B& backend, typename B::NativeStream native) {
  { backend.borrow_stream(native) } -> std::same_as<typename B::Stream>;
};

}  // namespace block_streamer::inline v1
