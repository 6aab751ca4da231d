// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/device/metered_backend.hpp>

#include <block_streamer/device/host_backend.hpp>

#include <device/backend_conformance.hpp>
#include <support/catch.hpp>

#include <optional>
#include <utility>
#include <vector>

namespace bs = block_streamer;
using Metered = bs::MeteredBackend<bs::HostBackend>;
static_assert(bs::execution_backend<Metered>);

TEST_CASE("a metered backend is an execution backend") {
  conformance::backend_conformance([] { return Metered{bs::HostBackend{bs::HostMode::detached}}; });
}

TEST_CASE("bytes count while they are held, whoever holds them, and the most at once is kept") {
  Metered backend;
  Metered copy = backend;
  auto first = std::optional{backend.allocate_device(1000)};
  {
    auto second = copy.allocate_device(300);
    CHECK(backend.device_memory().now == 1300);
    second = std::move(*first);
    first.reset();  // moved from: nothing to give back
    CHECK(backend.device_memory().now == 1000);
  }
  CHECK(backend.device_memory().now == 0);
  CHECK(backend.device_memory().peak == 1300);
  CHECK(copy.device_memory().peak == 1300);
  std::vector<std::byte> memory(777);
  auto registration = backend.register_host(memory);
  CHECK(backend.page_locked_memory().now == 777);
  registration.reset();
  CHECK(backend.page_locked_memory().now == 0);
  CHECK(backend.page_locked_memory().peak == 777);
  CHECK(backend.device_memory().peak == 1300);
}
