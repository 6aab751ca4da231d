// SPDX-License-Identifier: Apache-2.0
// Memory runs out at every single allocation of a call.
#include "toy_model.hpp"

#include <cstdlib>
#include <new>

#include <support/catch.hpp>

namespace bs = block_streamer;
using support::same_bits;

namespace {

/// Allocations of this thread that still succeed; negative: all do.
thread_local int allocations_left = -1;

void* allocate(std::size_t byte_count, std::size_t alignment) {
  if (allocations_left == 0) return nullptr;
  if (allocations_left > 0) --allocations_left;
  const std::size_t rounded = (byte_count + alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
}
void* allocate_or_throw(std::size_t byte_count, std::size_t alignment) {
  void* const memory = allocate(byte_count, alignment);
  if (memory == nullptr) throw std::bad_alloc{};
  return memory;
}
constexpr std::size_t usual = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

void* operator new(std::size_t byte_count) {
  return allocate_or_throw(byte_count, usual);
}
void* operator new(std::size_t byte_count, std::align_val_t alignment) {
  return allocate_or_throw(byte_count, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t byte_count, const std::nothrow_t&) noexcept {
  return allocate(byte_count, usual);
}
void* operator new(std::size_t byte_count, std::align_val_t alignment,
                   const std::nothrow_t&) noexcept {
  return allocate(byte_count, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

TEST_CASE("a change of type that memory runs out in leaves the streamer with the type before") {
  const support::ToyModel model;
  support::ToyContext context;
  for (const auto mode : {bs::HostMode::attached, bs::HostMode::detached}) {
    support::ToyStreamer<bs::HostBackend> streamer{model.blocks(), model.storage("file"),
                                                   bs::HostBackend{mode}, support::toy_options()};
    const at::Tensor x = support::toy_input(), wide = support::toy_input(at::kDouble);
    const at::Tensor expected = streamer.forward(x, context);
    int failures = 0;
    for (bool changed = false; !changed; ++failures) {
      allocations_left = failures;
      try {
        streamer.to(bs::DType::f64);
        changed = true;
      } catch (const std::bad_alloc&) {
      }
      allocations_left = -1;
      INFO("after " << failures << " allocations");
      if (changed) break;
      REQUIRE(streamer.dtype() == bs::DType::f32);
      if (failures % 7 == 0) REQUIRE(same_bits(streamer.forward(x, context), expected));
    }
    CHECK(failures > 30);
    CHECK(streamer.dtype() == bs::DType::f64);
    CHECK(at::allclose(streamer.forward(wide, context), expected.to(at::kDouble), 1e-4, 1e-4));
  }
}
