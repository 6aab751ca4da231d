// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/device/checked_backend.hpp>
#include <block_streamer/device/counting_backend.hpp>
#include <block_streamer/device/host_backend.hpp>

#include <device/backend_conformance.hpp>
#include <support/catch.hpp>

#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace bs = block_streamer;
using bs::Access;
using bs::CopyDirection;
using bs::HostBackend;
using bs::HostMode;
using bs::ViolationKind;
using Checked = bs::CheckedBackend<HostBackend>;

static_assert(bs::execution_backend<Checked>);
static_assert(!bs::borrowed_stream_backend<Checked>);
static_assert(bs::host_edge_backend<Checked> && !bs::host_edge_backend<HostBackend>);
static_assert(bs::execution_backend<bs::CountingBackend<HostBackend>>);
static_assert(bs::host_edge_backend<bs::CountingBackend<Checked>>);

namespace {

/// A backend whose streams may belong to somebody else.
struct BorrowingBackend : HostBackend {
  using HostBackend::HostBackend;
  using NativeStream = int;
  Stream borrow_stream(NativeStream) { return make_stream(); }
};
static_assert(bs::borrowed_stream_backend<bs::CheckedBackend<BorrowingBackend>>);
static_assert(bs::borrowed_stream_backend<bs::CountingBackend<BorrowingBackend>>);

/// The edges of the slot protocol; a run leaves one out.
enum class Edge {
  none,            ///< nothing is left out
  free_wait,       ///< the copy waits for the release of the slot
  late_release,    ///< the release is recorded after the kernels
  ready_wait,      ///< the kernels wait for the copy
  late_ready,      ///< ready is recorded after the copy
  chunk_copied,    ///< the drive writes the chunk after the copy has read it
  drive_to_copy,   ///< the copy is enqueued after the drive has written the chunk
  joined_teardown  ///< memory goes after the device was waited for
};

/// Four visits of one slot through one chunk. The kernels and the drive only declare their
/// accesses, so a missing edge is a violation and not a race of this program.
void run_slot_protocol(Checked& backend, Edge missing) {
  const auto slot = backend.allocate_device(3001);
  conformance::Pinned<Checked> chunk{backend, conformance::pattern(3001, 1)};
  auto copy = backend.make_stream();  // goes first, and runs out before the memory does
  auto compute = backend.make_stream();
  auto ready = backend.make_event();
  auto free = backend.make_event();
  backend.label(copy, "copy stream");
  backend.label(compute, "compute stream");
  for (int visit = 0; visit < 4; ++visit) {
    if (visit > 0 && missing != Edge::chunk_copied) backend.synchronize(ready);
    const auto tag = &chunk;
    bs::publish_host_edge(backend, tag);
    std::thread drive{[&] {
      backend.label_this_thread("the drive");
      bs::accept_host_edge(backend, tag);
      backend.touch_on_host(chunk.bytes, Access::write);
      if (missing != Edge::drive_to_copy) bs::publish_host_edge(backend, tag);
    }};
    drive.join();
    bs::accept_host_edge(backend, tag);
    if (visit > 0 && missing != Edge::free_wait) backend.wait(copy, free);
    if (missing == Edge::late_ready) backend.record(ready, copy);
    backend.copy_async(backend.bytes(slot), chunk.bytes, CopyDirection::host_to_device, copy);
    if (missing != Edge::late_ready) backend.record(ready, copy);
    if (missing != Edge::ready_wait) backend.wait(compute, ready);
    if (missing == Edge::late_release) backend.record(free, compute);
    backend.touch_on_stream(backend.bytes(slot), Access::read, compute);
    if (missing != Edge::late_release) backend.record(free, compute);
  }
  if (missing != Edge::joined_teardown) {
    auto end = backend.make_event();
    backend.record(end, compute);
    backend.wait(copy, end);
    backend.record(end, copy);
    backend.synchronize(end);
  }
}

/// The parties of the first violation, "later > earlier"; empty if there is none.
std::string first_parties(const bs::ViolationLog& log) {
  const auto all = log.violations();
  if (all.empty()) return {};
  return all[0].later.operation + " on " + all[0].later.actor + " > " + all[0].earlier.operation +
         " on " + all[0].earlier.actor;
}

template <class Program>
void in_both_modes(Program program) {
  for (const auto mode : {HostMode::attached, HostMode::detached}) {
    INFO((mode == HostMode::attached ? "attached" : "detached"));
    Checked backend{HostBackend{mode}};
    program(backend);
  }
}

}  // namespace

TEST_CASE("a checked backend is an execution backend, and conformance has no violation") {
  bs::ViolationLog last;
  SECTION("attached") {
    conformance::backend_conformance([&] {
      Checked backend{HostBackend{HostMode::attached}};
      last = backend.log();
      return backend;
    });
  }
  SECTION("detached") {
    conformance::backend_conformance(
        [&] {
          Checked backend{HostBackend{HostMode::detached}};
          last = backend.log();
          return backend;
        },
        conformance::PauseHolder{});
  }
  for (const auto& violation : last.violations()) {
    CHECK(violation.kind == ViolationKind::event_never_recorded);  // provoked there
  }
}

TEST_CASE("b71: the slot protocol has no violation, and one for each edge that is left out") {
  in_both_modes([](Checked& backend) {
    run_slot_protocol(backend, Edge::none);
    CHECK(to_string(backend.log()) == "");
  });
  struct Case {
    Edge missing;
    std::string parties;
  };
  for (const auto& [missing, parties] : std::vector<Case>{
           {Edge::free_wait,
            "copy_async writes on copy stream > a kernel's read on compute stream"},
           {Edge::late_release,
            "copy_async writes on copy stream > a kernel's read on compute stream"},
           {Edge::ready_wait,
            "a kernel's read on compute stream > copy_async writes on copy stream"},
           {Edge::late_ready,
            "a kernel's read on compute stream > copy_async writes on copy stream"},
           {Edge::chunk_copied, "the host's write on the drive > copy_async reads on copy stream"},
           {Edge::drive_to_copy, "copy_async reads on copy stream > the host's write on the drive"},
           {Edge::joined_teardown, ""}}) {
    in_both_modes([&, m = missing, p = parties](Checked& backend) {
      run_slot_protocol(backend, m);
      INFO(to_string(backend.log()));
      REQUIRE_FALSE(backend.log().empty());
      if (!p.empty()) CHECK(first_parties(backend.log()) == p);
      for (const auto& violation : backend.log().violations()) {
        CHECK(violation.kind == ViolationKind::unordered_access);
        CHECK(violation.range.end - violation.range.begin == 3001);
      }
    });
  }
}

TEST_CASE("b77: the host may use a copy's memory after synchronize, a true query or notify only") {
  in_both_modes([](Checked& backend) {
    for (const std::string how :
         {"nothing", "synchronize", "query", "notify", "notify unpublished"}) {
      backend.log().clear();
      auto stream = backend.make_stream();
      auto event = backend.make_event();
      auto end = backend.make_event();
      const auto buffer = backend.allocate_device(100);
      conformance::Pinned<Checked> host{backend, std::vector<std::byte>(100)};
      backend.touch_on_stream(backend.bytes(buffer), Access::write, stream);
      backend.copy_async(host.bytes, backend.bytes(buffer), CopyDirection::device_to_host, stream);
      backend.record(event, stream);
      if (how == "synchronize") backend.synchronize(event);
      while (how == "query" && !backend.query(event)) std::this_thread::yield();
      if (how.starts_with("notify")) {
        conformance::Tally tally;
        backend.notify(event, [&](std::error_code error, std::size_t) {
          backend.touch_on_host(host.bytes, Access::read);
          if (how == "notify") backend.host_release(&tally);
          tally.add(error);
        });
        tally.wait_for(1);
        if (how == "notify") backend.host_acquire(&tally);
      }
      const bool ordered_here =
          how != "nothing" && (how != "notify unpublished" || backend.host_addressable());
      backend.touch_on_host(host.bytes, Access::read);
      CHECK(backend.log().empty() == ordered_here);
      backend.record(end, stream);
      backend.synchronize(end);
      backend.host_acquire(&end);
    }
  });
}

TEST_CASE("what a thread did before it enqueued is ordered, what it does afterwards is not") {
  in_both_modes([](Checked& backend) {
    auto stream = backend.make_stream();
    auto event = backend.make_event();
    const auto buffer = backend.allocate_device(64);
    conformance::Pinned<Checked> host{backend, std::vector<std::byte>(64)};
    backend.touch_on_host(host.bytes, Access::write);
    backend.copy_async(backend.bytes(buffer), host.bytes, CopyDirection::host_to_device, stream);
    CHECK(backend.log().empty());
    backend.touch_on_host(host.bytes, Access::read);
    CHECK(backend.log().empty());
    backend.touch_on_host(std::span{host.bytes}.subspan(63), Access::write);
    CHECK(backend.log().count() == 1);
    backend.record(event, stream);
    backend.synchronize(event);
    backend.touch_on_host(host.bytes, Access::write);
    CHECK(backend.log().count() == 1);
  });
}

TEST_CASE("two streams that write the same bytes conflict where they overlap") {
  in_both_modes([](Checked& backend) {
    auto one = backend.make_stream();
    auto two = backend.make_stream();
    auto event = backend.make_event();
    const auto buffer = backend.allocate_device(100);
    backend.touch_on_stream(backend.bytes(buffer).first(60), Access::write, one);
    backend.record(event, one);
    backend.touch_on_stream(backend.bytes(buffer).subspan(60), Access::write, two);
    CHECK(backend.log().empty());
    backend.touch_on_stream(backend.bytes(buffer).subspan(50), Access::write, two);
    REQUIRE(backend.log().count() == 1);
    const auto range = backend.log().violations()[0].range;
    CHECK(range.end - range.begin == 10);
    backend.wait(one, event);  // its own event orders nothing new
    backend.touch_on_stream(backend.bytes(buffer), Access::write, one);
    CHECK(backend.log().count() == 2);
    for (auto* stream : {&one, &two}) {
      backend.record(event, *stream);
      backend.synchronize(event);
    }
  });
}

TEST_CASE("a copy needs registered host memory, in one registration, while it is alive") {
  Checked backend{HostBackend{HostMode::detached}};
  auto stream = backend.make_stream();
  auto event = backend.make_event();
  const auto buffer = backend.allocate_device(100);
  std::vector<std::byte> host(100);
  const std::span memory{host};
  auto copy = [&](std::size_t offset, std::size_t n) {
    backend.copy_async(memory.subspan(offset, n), backend.bytes(buffer).subspan(offset, n),
                       CopyDirection::device_to_host, stream);
    backend.record(event, stream);
    backend.synchronize(event);
    return backend.log().count();
  };
  CHECK(copy(0, 100) == 1);
  CHECK(backend.log().violations()[0].kind == ViolationKind::unregistered_host_memory);
  auto low = backend.register_host(memory.first(50));
  auto high = backend.register_host(memory.subspan(50));
  CHECK(copy(0, 50) == 1);
  CHECK(copy(50, 50) == 1);
  CHECK(copy(49, 2) == 2);
  auto moved = std::move(high);
  CHECK(copy(60, 1) == 2);
  moved.reset();
  high.reset();
  CHECK(copy(60, 1) == 3);

  Checked lenient{HostBackend{HostMode::detached}, {.require_registration = false}};
  auto other = lenient.make_stream();
  auto done = lenient.make_event();
  const auto target = lenient.allocate_device(100);
  lenient.copy_async(lenient.bytes(target), memory, CopyDirection::host_to_device, other);
  lenient.record(done, other);
  lenient.synchronize(done);
  CHECK(lenient.log().empty());
}

TEST_CASE("memory that is allocated again starts without a history") {
  Checked backend{HostBackend{}, {.check_release = false}};
  auto one = backend.make_stream();
  auto two = backend.make_stream();
  for (int i = 0; i < 20; ++i) {
    const auto buffer = backend.allocate_device(4096);
    backend.touch_on_stream(backend.bytes(buffer), Access::write, i % 2 == 0 ? one : two);
  }
  CHECK(to_string(backend.log()) == "");
}

TEST_CASE("waiting for an event that was never recorded is logged and refused") {
  in_both_modes([](Checked& backend) {
    auto stream = backend.make_stream();
    auto event = backend.make_event();
    CHECK_THROWS_AS(backend.wait(stream, event), bs::ContractViolation);
    CHECK_THROWS_AS(backend.synchronize(event), bs::ContractViolation);
    REQUIRE(backend.log().count() == 2);
    CHECK(backend.log().violations()[0].kind == ViolationKind::event_never_recorded);
    CHECK(to_string(backend.log()).find("wait on stream 0") == 0);
  });
}

TEST_CASE("one native stream is one actor, however often it is borrowed") {
  bs::CheckedBackend<BorrowingBackend> backend;
  auto first = backend.borrow_stream(7);
  auto again = backend.borrow_stream(7);
  auto other = backend.borrow_stream(8);
  auto event = backend.make_event();
  const auto buffer = backend.allocate_device(10);
  backend.touch_on_stream(backend.bytes(buffer), Access::write, first);
  backend.touch_on_stream(backend.bytes(buffer), Access::write, again);
  CHECK(backend.log().empty());
  backend.touch_on_stream(backend.bytes(buffer), Access::read, other);
  CHECK(backend.log().count() == 1);
  backend.record(event, other);
  backend.synchronize(event);
  backend.record(event, again);
  backend.synchronize(event);
}

TEST_CASE("the log calls back, keeps a bounded list and counts on") {
  Checked backend;
  auto stream = backend.make_stream();
  auto event = backend.make_event();
  std::size_t called = 0;
  backend.log().on_violation([&](const bs::Violation& violation) {
    ++called;
    backend.touch_on_host({}, Access::read);  // nothing is locked
    CHECK_FALSE(to_string(violation).empty());
  });
  const auto n = bs::ViolationLog::kept + 10;
  for (std::size_t i = 0; i < n; ++i) {
    CHECK_THROWS_AS(backend.wait(stream, event), bs::ContractViolation);
  }
  CHECK(called == n);
  CHECK(backend.log().count() == n);
  CHECK(backend.log().violations().size() == bs::ViolationLog::kept);
  backend.log().on_violation({});
}

TEST_CASE("a counting backend counts what was asked, its copies included") {
  bs::CountingBackend<HostBackend> backend;
  auto copy = backend;
  auto stream = backend.make_stream();
  auto event = copy.make_event();
  const auto buffer = backend.allocate_device(10);
  std::vector<std::byte> host(10);
  copy.copy_async(copy.bytes(buffer), host, CopyDirection::host_to_device, stream);
  copy.record(event, stream);
  backend.wait(stream, event);
  CHECK(backend.query(event));
  backend.synchronize(event);
  CHECK(backend.counts().copies == 1);
  CHECK(backend.counts().copied_bytes == 10);
  CHECK(backend.counts().allocated_bytes == 10);
  CHECK(backend.counts().records == 1);
  CHECK(backend.counts().waits == 1);
  CHECK(backend.counts().queries == 1);
  CHECK(backend.counts().synchronizes == 1);
  CHECK(backend.counts().notifies == 0);
}
