// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/device/host_backend.hpp>

#include <device/backend_conformance.hpp>
#include <support/catch.hpp>

#include <vector>

namespace bs = block_streamer;
using bs::CopyDirection;
using bs::HostBackend;
using bs::HostMode;

TEST_CASE("the attached host backend is an execution backend") {
  conformance::backend_conformance([] { return HostBackend{HostMode::attached}; });
}

TEST_CASE("the detached host backend is an execution backend") {
  conformance::backend_conformance([] { return HostBackend{HostMode::detached}; },
                                   conformance::PauseHolder{});
}

TEST_CASE("attached: a copy is done, a record passed and a completion called on return") {
  HostBackend backend;
  CHECK(backend.host_addressable());
  auto stream = backend.make_stream();
  auto event = backend.make_event();
  const auto buffer = backend.allocate_device(5);
  const auto source = conformance::pattern(5, 1);
  backend.copy_async(backend.bytes(buffer), source, CopyDirection::host_to_device, stream);
  CHECK(std::vector(backend.bytes(buffer).begin(), backend.bytes(buffer).end()) == source);
  backend.record(event, stream);
  CHECK(backend.query(event));
  const auto caller = std::this_thread::get_id();
  bool called = false;
  backend.notify(event, [&](std::error_code error, std::size_t) {
    called = !error && std::this_thread::get_id() == caller;
  });
  CHECK(called);
  CHECK_THROWS_AS(backend.pause(stream), bs::ContractViolation);
}

TEST_CASE("detached: a paused stream does nothing, and its destructor all it held") {
  HostBackend backend{HostMode::detached};
  CHECK_FALSE(backend.host_addressable());
  const auto source = conformance::pattern(1001, 1);
  const auto buffer = backend.allocate_device(1001);
  auto before = backend.make_event();
  auto event = backend.make_event();
  {
    auto stream = backend.make_stream();
    backend.record(before, stream);
    backend.pause(stream);
    backend.synchronize(before);  // what was enqueued before the pause goes on
    backend.copy_async(backend.bytes(buffer), source, CopyDirection::host_to_device, stream);
    backend.record(event, stream);
    CHECK_FALSE(backend.query(event));
  }
  CHECK(backend.query(event));
  CHECK(std::vector(backend.bytes(buffer).begin(), backend.bytes(buffer).end()) == source);
}

TEST_CASE("detached: each pause has its own resume") {
  HostBackend backend{HostMode::detached};
  auto stream = backend.make_stream();
  auto first = backend.make_event();
  auto second = backend.make_event();
  backend.pause(stream);
  backend.record(first, stream);
  backend.resume(stream);
  backend.pause(stream);
  backend.record(second, stream);
  backend.synchronize(first);
  CHECK_FALSE(backend.query(second));
  backend.resume(stream);
  backend.synchronize(second);
}

TEST_CASE("overlapping ranges and moved-from objects are contract violations") {
  for (const auto mode : {HostMode::attached, HostMode::detached}) {
    HostBackend backend{mode};
    auto stream = backend.make_stream();
    auto event = backend.make_event();
    const auto buffer = backend.allocate_device(64);
    const auto bytes = backend.bytes(buffer);
    CHECK_THROWS_AS(backend.copy_async(bytes.subspan(1, 10), bytes.subspan(10, 10),
                                       CopyDirection::device_to_device, stream),
                    bs::ContractViolation);
    backend.copy_async(bytes.first(10), bytes.subspan(10, 10), CopyDirection::device_to_device,
                       stream);
    auto moved_stream = std::move(stream);
    auto moved_event = std::move(event);
    CHECK_THROWS_AS(backend.record(moved_event, stream), bs::ContractViolation);
    CHECK_THROWS_AS(backend.record(event, moved_stream), bs::ContractViolation);
    CHECK_THROWS_AS(backend.query(event), bs::ContractViolation);
  }
}

TEST_CASE("memory that does not exist is a DeviceError that names its size") {
  HostBackend backend;
  constexpr std::size_t too_much = ~std::size_t{0} - 5;
  CHECK_THROWS_AS(backend.allocate_device(too_much), bs::DeviceError);
  try {
    (void)backend.allocate_device(too_much);
  } catch (const bs::DeviceError& error) {
    CHECK(std::string{error.what()}.find(std::to_string(too_much)) != std::string::npos);
  }
}
