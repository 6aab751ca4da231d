// SPDX-License-Identifier: Apache-2.0
// Needs a device: run without one, it prints the reason and returns 0 after the tests that need
// none.
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/counting_backend.hpp>
#include <block_streamer/device/cuda_backend.hpp>

#include <device/backend_conformance.hpp>
#include <support/catch.hpp>

#include <algorithm>
#include <condition_variable>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace bs = block_streamer;
using bs::CopyDirection;
using bs::CudaBackend;
using Checked = bs::CheckedBackend<CudaBackend>;

static_assert(bs::borrowed_stream_backend<Checked>);
static_assert(bs::borrowed_stream_backend<bs::CountingBackend<CudaBackend>>);
static_assert(std::is_nothrow_destructible_v<CudaBackend> &&
              std::is_nothrow_destructible_v<CudaBackend::DeviceBuffer>);

namespace {

/// True where the test cannot run; says why, once a test.
bool skipped() {
  const auto reason = CudaBackend::why_unusable();
  if (reason) std::cerr << "skipped: " << *reason << '\n';
  return reason.has_value();
}

/// Holds a stream by a host function that waits for its release. One stream at a time.
class HostFunctionHolder {
 public:
  static constexpr bool can_hold = true;
  template <class Backend>
  void hold(Backend&, typename Backend::Stream& stream) {
    cudaStream_t native{};
    if constexpr (requires { stream.inner(); }) {
      native = stream.inner().native();
    } else {
      native = stream.native();
    }
    {
      const std::lock_guard lock{gate_->mutex};
      gate_->open = false;
    }
    REQUIRE(cudaLaunchHostFunc(native, &HostFunctionHolder::block, gate_.get()) == cudaSuccess);
  }
  template <class Backend>
  void release(Backend&, typename Backend::Stream&) {
    const std::lock_guard lock{gate_->mutex};
    gate_->open = true;
    gate_->changed.notify_all();
  }

 private:
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  static void block(void* context) {
    auto& gate = *static_cast<Gate*>(context);
    std::unique_lock lock{gate.mutex};
    gate.changed.wait(lock, [&] { return gate.open; });
  }
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

/// Lives until the program's exit, when the runtime may have gone already.
struct ExitWitness {
  CudaBackend backend;
  CudaBackend::Stream stream = backend.make_stream();
  CudaBackend::Event event = backend.make_event();
  CudaBackend::DeviceBuffer buffer = backend.allocate_device(1024);
};
std::unique_ptr<ExitWitness>& exit_witness() {
  static std::unique_ptr<ExitWitness> witness;
  return witness;
}

}  // namespace

TEST_CASE("cuda: without a device it says why, and nothing throws but the constructor") {
  CHECK(CudaBackend::device_count() >= 0);
  const auto reason = CudaBackend::why_unusable();
  CHECK(reason.has_value() == (CudaBackend::device_count() == 0));
  const int none = CudaBackend::device_count();
  CHECK_THROWS_AS(CudaBackend{none}, bs::DeviceError);
  CHECK_THROWS_AS(CudaBackend{-1}, bs::DeviceError);
  try {
    CudaBackend backend{none};
  } catch (const bs::DeviceError& error) {
    const std::string text = error.what();
    CHECK(text.find("cuda:" + std::to_string(none)) == 0);
    if (reason) CHECK(text.find(*reason) != std::string::npos);
    CHECK_FALSE(error.sticky());
  }
}

TEST_CASE("cuda: refusals are not sticky, failures of a kernel or the hardware are") {
  for (const auto error : {cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorNotReady,
                           cudaErrorHostMemoryAlreadyRegistered, cudaErrorNotSupported}) {
    CHECK_FALSE(bs::is_sticky_cuda_error(error));
  }
  for (const auto error : {cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorAssert,
                           cudaErrorECCUncorrectable, cudaErrorHardwareStackError}) {
    CHECK(bs::is_sticky_cuda_error(error));
  }
}

TEST_CASE("cuda: it is an execution backend") {
  if (skipped()) return;
  conformance::backend_conformance([] { return CudaBackend{}; }, HostFunctionHolder{});
}

TEST_CASE("cuda: it is one under the checker, without a violation") {
  if (skipped()) return;
  std::vector<bs::ViolationLog> logs;
  conformance::backend_conformance(
      [&] {
        Checked backend{CudaBackend{}};
        logs.push_back(backend.log());
        return backend;
      },
      HostFunctionHolder{});
  for (const auto& log : logs) {
    for (const auto& violation : log.violations()) {
      CHECK(violation.kind == bs::ViolationKind::event_never_recorded);  // provoked there
    }
  }
}

TEST_CASE("cuda: b33 no bytes are never registered, and no error is left pending") {
  if (skipped()) return;
  CudaBackend backend;
  std::vector<std::byte> memory(10000);
  {
    const auto empty = backend.register_host({});
    const auto none = backend.register_host(std::span{memory}.first(0));
    CHECK(empty.has_value());
    CHECK(none.has_value());
  }
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("cuda: b35 a refused registration is nullopt, leaves no error, and can be tried again") {
  if (skipped()) return;
  CudaBackend backend;
  std::vector<std::byte> memory(10000);
  for (int i = 0; i < 50; ++i) {
    auto first = backend.register_host(memory);
    REQUIRE(first.has_value());
    CHECK_FALSE(backend.register_host(memory).has_value());
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    auto moved = std::move(first);
    first.reset();
    CHECK_FALSE(backend.register_host(memory).has_value());
  }
}

TEST_CASE(
    "cuda: memory that does not exist is an error with call, size and code, and no sticky one") {
  if (skipped()) return;
  CudaBackend backend;
  constexpr std::size_t too_much = std::size_t{1} << 50U;
  try {
    (void)backend.allocate_device(too_much);
    FAIL("a petabyte was allocated");
  } catch (const bs::DeviceError& error) {
    const std::string text = error.what();
    CHECK(text.find("cuda:0: cudaMalloc of " + std::to_string(too_much)) == 0);
    CHECK(text.find("cudaErrorMemoryAllocation") != std::string::npos);
    CHECK(error.native_code() == static_cast<int>(cudaErrorMemoryAllocation));
    CHECK_FALSE(error.sticky());
  }
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK(backend.bytes(backend.allocate_device(4096)).size() == 4096);
}

TEST_CASE("cuda: an injected resource gives and takes the memory") {
  if (skipped()) return;
  std::size_t held = 0;
  std::size_t given = 0;
  {
    auto backend = std::make_optional<CudaBackend>(
        0, bs::DeviceMemoryResource{[&](std::size_t n) {
                                      if (n == 13) throw std::runtime_error{"unlucky"};
                                      void* memory = nullptr;
                                      REQUIRE(cudaMalloc(&memory, n) == cudaSuccess);
                                      held += n;
                                      given += n;
                                      return memory;
                                    },
                                    [&](void* memory, std::size_t n) {
                                      CHECK(cudaFree(memory) == cudaSuccess);
                                      held -= n;
                                    }});
    auto first = backend->allocate_device(1000);
    const auto second = backend->allocate_device(24);
    first = backend->allocate_device(500);
    CHECK(held == 524);
    CHECK_THROWS_AS(backend->allocate_device(13), bs::DeviceError);
    CHECK_THROWS_AS((CudaBackend{0, {[](std::size_t) -> void* { return nullptr; }, {}}}),
                    bs::ContractViolation);
    backend.reset();  // buffers keep the resource
  }
  CHECK(held == 0);
  CHECK(given == 1524);
}

TEST_CASE(
    "cuda: b76 a borrowed stream is not destroyed with its handle, nor needed by its events") {
  if (skipped()) return;
  CudaBackend backend;
  cudaStream_t native = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking) == cudaSuccess);
  auto event = backend.make_event();
  {
    auto borrowed = backend.borrow_stream(native);
    CHECK(borrowed.native() == native);
    backend.record(event, borrowed);
  }
  CHECK(cudaStreamQuery(native) != cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamDestroy(native) == cudaSuccess);
  backend.synchronize(event);
  auto default_stream = backend.borrow_stream(nullptr);
  backend.record(event, default_stream);
  backend.synchronize(event);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("cuda: a host is not held up by a copy from registered memory") {
  if (skipped()) return;
  CudaBackend backend;
  auto stream = backend.make_stream();
  auto event = backend.make_event();
  HostFunctionHolder holder;
  const auto buffer = backend.allocate_device(1U << 24U);
  conformance::Pinned<CudaBackend> host{backend, conformance::pattern(1U << 24U, 1)};
  holder.hold(backend, stream);
  backend.copy_async(backend.bytes(buffer), host.bytes, CopyDirection::host_to_device, stream);
  backend.record(event, stream);
  CHECK_FALSE(backend.query(event));
  CHECK(cudaPeekAtLastError() == cudaSuccess);  // "not ready" is no pending error
  holder.release(backend, stream);
  backend.synchronize(event);
  CHECK(conformance::download(backend, backend.bytes(buffer), stream) == host.bytes);
}

TEST_CASE("cuda: timing events measure, others refuse to") {
  if (skipped()) return;
  CudaBackend backend;
  auto stream = backend.make_stream();
  auto begin = backend.make_timing_event();
  auto end = backend.make_timing_event();
  const auto buffer = backend.allocate_device(1U << 24U);
  conformance::Pinned<CudaBackend> host{backend, conformance::pattern(1U << 24U, 1)};
  backend.record(begin, stream);
  backend.copy_async(backend.bytes(buffer), host.bytes, CopyDirection::host_to_device, stream);
  backend.record(end, stream);
  backend.synchronize(end);
  CHECK(backend.elapsed(begin, end).count() > 0);
  auto plain = backend.make_event();
  backend.record(plain, stream);
  backend.synchronize(plain);
  CHECK_THROWS_AS(backend.elapsed(begin, plain), bs::DeviceError);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("cuda: properties describe the device") {
  if (skipped()) return;
  const auto properties = CudaBackend{}.properties();
  CHECK_FALSE(properties.name.empty());
  CHECK(properties.compute_capability >= 50);
  CHECK(properties.total_byte_count > 0);
  CHECK(properties.free_byte_count <= properties.total_byte_count);
}

TEST_CASE("cuda: a thread's current device is left as it was") {
  if (skipped()) return;
  const int last = CudaBackend::device_count() - 1;
  CudaBackend backend{last};
  CHECK(backend.name() == "cuda:" + std::to_string(last));
  std::thread other{[&] {
    int device = -1;
    auto stream = backend.make_stream();
    auto event = backend.make_event();
    const auto buffer = backend.allocate_device(100);
    conformance::Pinned<CudaBackend> host{backend, conformance::pattern(100, 1)};
    backend.copy_async(backend.bytes(buffer), host.bytes, CopyDirection::host_to_device, stream);
    backend.record(event, stream);
    backend.synchronize(event);
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    CHECK(device == 0);
    cudaPointerAttributes where{};
    CHECK(cudaPointerGetAttributes(&where, backend.bytes(buffer).data()) == cudaSuccess);
    CHECK(where.device == last);
  }};
  other.join();
}

TEST_CASE("cuda: twenty backends leave no device memory behind") {
  if (skipped()) return;
  CudaBackend keep;
  std::vector<std::uint64_t> free;
  for (int i = 0; i < 20; ++i) {
    CudaBackend backend;
    auto stream = backend.make_stream();
    auto event = backend.make_event();
    const auto buffer = backend.allocate_device(64U << 20U);
    backend.record(event, stream);
    backend.synchronize(event);
    free.push_back(backend.properties().free_byte_count);
  }
  CHECK(free.back() + (32U << 20U) >= free[4]);
}

TEST_CASE("cuda: objects that live to the program's exit go quietly") {
  if (skipped()) return;
  exit_witness() = std::make_unique<ExitWitness>();
  auto& w = *exit_witness();
  w.backend.record(w.event, w.stream);
  w.backend.synchronize(w.event);
  CHECK(w.backend.query(w.event));
}
