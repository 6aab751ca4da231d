// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/block/any_block.hpp>
#include <block_streamer/block/dtype_finisher.hpp>
#include <block_streamer/block/mutation_guard.hpp>
#include <block_streamer/block/resident_forward.hpp>
#include <block_streamer/block/tensor_bridge.hpp>
#include <block_streamer/block/view_cache.hpp>
#include <block_streamer/block/weight_binding.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <support/catch.hpp>

namespace bs = block_streamer;
using bs::DType;

namespace {

const at::Device cpu{at::kCPU};

/// Bytes whose value depends on their place.
std::vector<std::byte> patterned(std::size_t byte_count, unsigned seed = 1) {
  std::vector<std::byte> bytes(byte_count);
  for (std::size_t i = 0; i < byte_count; ++i)
    bytes[i] = static_cast<std::byte>((i * 131 + seed * 29 + i / 251) & 0xff);
  return bytes;
}

bs::BlockLayout layout_of(const std::vector<bs::TensorSpec>& specs) {
  bs::BlockLayout layout;
  for (const bs::TensorSpec& spec : specs) {
    const std::uint64_t bytes = bs::dense_byte_count(spec.dtype, spec.shape).value();
    std::uint64_t& end = layout.slot_byte_count[0];
    const std::uint64_t offset = bytes == 0 ? 0 : bs::round_up(end, bs::tensor_alignment);
    layout.tensors.push_back({spec, 0, offset, bytes});
    end = std::max(end, offset + bytes);
  }
  return layout;
}

std::string message_of(const auto& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("every stored element type has a LibTorch type of the same size and back") {
  for (std::size_t i = 0; i < 16; ++i) {
    const auto dtype = static_cast<DType>(i);
    INFO(bs::name_of(dtype));
    CHECK(bs::dtype_of(bs::scalar_type_of(dtype)) == dtype);
    CHECK(c10::elementSize(bs::scalar_type_of(dtype)) == bs::byte_count_of(dtype));
  }
  CHECK_THROWS_AS(bs::dtype_of(at::kComplexFloat), bs::UnsupportedError);
}

TEST_CASE("a view reads the bytes where they lie, at any offset and of any type") {
  auto memory = patterned(4096);
  for (std::size_t i = 0; i < 16; ++i) {
    const bs::TensorSpec spec{"w", static_cast<DType>(i), {3, 5}};
    const std::size_t bytes = 15 * bs::byte_count_of(spec.dtype);
    const at::Tensor view = bs::view_of(std::span{memory}.subspan(48, bytes), spec, cpu);
    CHECK(view.sizes() == at::IntArrayRef{3, 5});
    CHECK(view.scalar_type() == bs::scalar_type_of(spec.dtype));
    CHECK(view.const_data_ptr() == memory.data() + 48);
  }
}

TEST_CASE("scalars and tensors without elements are views like any other") {
  float value = 3.5F;
  const auto bytes = std::as_writable_bytes(std::span{&value, 1});
  const at::Tensor scalar = bs::view_of(bytes, {"s", DType::f32, {}}, cpu);
  CHECK(scalar.dim() == 0);
  CHECK(scalar.item<float>() == 3.5F);
  for (const bs::Shape& shape : {bs::Shape{0}, bs::Shape{2, 0}, bs::Shape{0, 3}}) {
    const at::Tensor empty = bs::view_of({}, {"e", DType::bf16, shape}, cpu);
    CHECK(empty.numel() == 0);
    CHECK(bs::shape_of(empty) == shape);
  }
}

TEST_CASE("memory of another size than the tensor's is refused") {
  auto memory = patterned(64);
  CHECK_THROWS_AS(bs::view_of(memory, {"w", DType::f32, {3, 5}}, cpu), bs::ContractViolation);
}

TEST_CASE("views made in inference mode are normal tensors with a counter of their own") {
  auto memory = patterned(64);
  const c10::InferenceMode inference;
  const at::Tensor a = bs::view_of(std::span{memory}.first(32), {"a", DType::f32, {8}}, cpu);
  const at::Tensor b = bs::view_of(std::span{memory}.last(32), {"b", DType::f32, {8}}, cpu);
  CHECK_FALSE(a.is_inference());
  a.unsafeGetTensorImpl()->bump_version();
  CHECK(a._version() == 1);
  CHECK(b._version() == 0);
}

TEST_CASE("binding finds each weight by name, whatever the stored order") {
  const auto layout = layout_of({{"b", DType::bf16, {4}}, {"a", DType::bf16, {2, 3}}});
  const std::vector<bs::WeightSpec> specs{{"a", {2, 3}, true}, {"b", {4}}};
  const bs::WeightBinding binding = bs::bind_weights(bs::block_at(0), specs, layout);
  CHECK(binding.tensors == std::vector<std::uint32_t>{1, 0});
  CHECK(binding.names == std::vector<std::string>{"a", "b"});
  CHECK(binding.dtype == DType::bf16);
}

TEST_CASE("mixed floating types are reported as no common type") {
  const auto layout = layout_of({{"a", DType::bf16, {4}}, {"b", DType::f32, {4}}});
  const std::vector<bs::WeightSpec> specs{{"a", {4}}, {"b", {4}}};
  CHECK_FALSE(bs::bind_weights(bs::block_at(0), specs, layout).dtype.has_value());
}

TEST_CASE("one message names every missing, unexpected, wrongly shaped and wrongly typed tensor") {
  const auto layout = layout_of({{"wrong_shape", DType::f32, {3, 2}},
                                 {"wrong_type", DType::f8_e4m3, {4}},
                                 {"extra", DType::f32, {7}},
                                 {"packed", DType::u8, {9}}});
  const std::vector<bs::WeightSpec> specs{{"wrong_shape", {2, 3}, true},
                                          {"wrong_type", {4}},
                                          {"absent", {5, 6}},
                                          {"packed", {9}, false, false}};
  const auto bind = [&] { (void)bs::bind_weights(bs::block_at(17), specs, layout); };
  CHECK_THROWS_AS(bind(), bs::BindingError);
  const std::string text = message_of(bind);
  CHECK(has(text, "block 17"));
  CHECK(has(text, "wrong_shape: stored as [3, 2], the block needs [2, 3]"));
  CHECK(has(text, "wrong_type: stored as F8_E4M3"));
  CHECK(has(text, "absent: missing, the block needs [5, 6]"));
  CHECK(has(text, "extra: stored as [7]"));
  CHECK_FALSE(has(text, "packed"));
}

TEST_CASE("views are built once for each slot and layout and shared by blocks that lie alike") {
  const auto layout = layout_of({{"a", DType::f32, {3}}, {"b", DType::f32, {2, 2}}});
  const auto other = layout_of({{"x", DType::f32, {5}}});
  auto slots = patterned(2048);
  const auto first = std::span{slots}.first(1024);
  const auto second = std::span{slots}.last(1024);
  bs::ViewCache cache{cpu};
  const std::vector<std::uint32_t> order{1, 0};
  const std::vector<std::uint32_t> single{0};
  const bs::LayoutId id = cache.add(layout, order);
  CHECK(cache.add(layout, order) == id);
  CHECK(cache.add(other, single) != id);

  const auto views = cache.views(first, id);
  REQUIRE(views.size() == 2);
  CHECK(views[0].const_data_ptr() == first.data() + 256);
  CHECK(views[1].const_data_ptr() == first.data());
  CHECK(cache.views(first, id).data() == views.data());
  CHECK(cache.views(second, id)[1].const_data_ptr() == second.data());
  CHECK(cache.views(first, id).data() == views.data());
}

TEST_CASE("b147_views_ask_for_no_ownership_and_a_slot_that_is_too_small_is_refused") {
  const auto layout = layout_of({{"a", DType::f32, {3}}, {"b", DType::f32, {2, 2}}});
  auto slot = patterned(256 + 15);
  bs::ViewCache cache{cpu};
  const std::vector<std::uint32_t> order{0, 1};
  const bs::LayoutId id = cache.add(layout, order);
  CHECK_THROWS_AS(cache.views(slot, id), bs::ContractViolation);
}

TEST_CASE("a refill is visible to whoever saved a view over any overlapping slot") {
  const auto layout = layout_of({{"a", DType::f32, {3}}});
  const auto other = layout_of({{"x", DType::f32, {5}}});
  auto memory = patterned(3072);
  const auto low = std::span{memory}.first(1024);
  const auto middle = std::span{memory}.subspan(512, 1024);
  const auto high = std::span{memory}.last(1024);
  bs::ViewCache cache{cpu};
  const std::vector<std::uint32_t> order{0};
  const auto a = cache.add(layout, order);
  const auto x = cache.add(other, order);
  const at::Tensor low_a = cache.views(low, a)[0];
  const at::Tensor low_x = cache.views(low, x)[0];
  const at::Tensor middle_a = cache.views(middle, a)[0];
  const at::Tensor high_a = cache.views(high, a)[0];
  cache.refilled(low);
  CHECK(low_a._version() == 1);
  CHECK(low_x._version() == 1);
  CHECK(middle_a._version() == 1);
  CHECK(high_a._version() == 0);
}

TEST_CASE("a weight saved for backward by mistake fails there once its slot was refilled") {
  const auto layout = layout_of({{"a", DType::f32, {4}}});
  auto slot = patterned(256);
  bs::ViewCache cache{cpu};
  const std::vector<std::uint32_t> order{0};
  const auto id = cache.add(layout, order);
  const at::Tensor x = at::ones({4}).requires_grad_();
  const at::Tensor loss = (x * cache.views(slot, id)[0]).sum();
  cache.refilled(slot);
  CHECK(has(message_of([&] { loss.backward(); }), "modified by an inplace operation"));
}

TEST_CASE("the guard names the block and the weight that was written") {
  std::vector<at::Tensor> weights{at::ones({3}), at::ones({2, 2}), at::ones({})};
  const std::vector<std::string> names{"norm.weight", "proj.weight", "scale"};
  bs::MutationGuard guard;
  guard.arm(weights);
  CHECK_NOTHROW(guard.check(bs::block_at(4), weights, names));
  const at::Tensor sum = weights[1] + weights[1].t();
  CHECK_NOTHROW(guard.check(bs::block_at(4), weights, names));

  const auto check = [&] { guard.check(bs::block_at(4), weights, names); };
  SECTION("in place") {
    weights[1].add_(1);
  }
  SECTION("through a view of it") {
    weights[1].select(0, 1).zero_();
  }
  SECTION("in inference mode") {
    const c10::InferenceMode inference;
    weights[1].mul_(2);
  }
  SECTION("resized") {
    weights[1].resize_({1, 2});
  }
  SECTION("pointed elsewhere") {
    weights[1].set_(at::ones({2, 2}));
  }
  SECTION("replaced data") {
    weights[1].set_data(at::ones({2, 2}));
  }
  SECTION("turned round") {
    weights[1].t_();
  }
  CHECK_THROWS_AS(check(), bs::ContractViolation);
  CHECK(has(message_of(check), "block 4 changed its weight proj.weight"));
  guard.arm(weights);
  CHECK_NOTHROW(check());
}

TEST_CASE("forgotten views are built anew") {
  const auto layout = layout_of({{"a", DType::f32, {4}}});
  auto slot = patterned(256);
  bs::ViewCache cache{cpu};
  const std::vector<std::uint32_t> order{0};
  const auto id = cache.add(layout, order);
  cache.views(slot, id)[0].set_(at::ones({4}));
  CHECK(cache.views(slot, id)[0].const_data_ptr() != slot.data());
  cache.forget(slot);
  CHECK(cache.views(slot, id)[0].const_data_ptr() == slot.data());
}

TEST_CASE("only an output that shares memory with the slot is copied") {
  auto slot = patterned(512);
  const at::Tensor weight = bs::view_of(std::span{slot}.first(64), {"w", DType::f32, {16}}, cpu);
  const at::Tensor own = at::ones({16});
  CHECK(bs::detached_from(slot, own).is_same(own));
  const at::Tensor view = weight.narrow(0, 3, 5);
  const at::Tensor copy = bs::detached_from(slot, view);
  CHECK_FALSE(bs::overlaps(copy, slot));
  CHECK(at::equal(copy.view(at::kInt), view.view(at::kInt)));
  CHECK_FALSE(bs::overlaps(at::empty({0}), slot));
  CHECK_FALSE(bs::overlaps(at::Tensor{}, slot));
  CHECK_FALSE(bs::overlaps(weight, std::span{slot}.last(64)));
}

TEST_CASE("the bound layout converts what computes and carries what is packed") {
  const auto wire = layout_of({{"w", DType::bf16, {3, 50}},
                               {"ids", DType::i64, {5}},
                               {"scale", DType::f8_e4m3, {7}},
                               {"none", DType::f16, {0, 4}},
                               {"norm", DType::f32, {3}}});
  const bs::BlockLayout bound = bs::bound_layout(wire, DType::f32);
  CHECK(bound.tensors[0].spec.dtype == DType::f32);
  CHECK(bound.tensors[0].byte_count == 600);
  CHECK(bound.tensors[1].slot_offset == 768);
  CHECK(bound.tensors[1].spec.dtype == DType::i64);
  CHECK(bound.tensors[2].spec.dtype == DType::f8_e4m3);
  CHECK(bound.tensors[3].spec.dtype == DType::f32);
  CHECK(bound.tensors[3].byte_count == 0);
  CHECK(bound.slot_byte_count[0] == bound.tensors[4].slot_offset + 12);
  for (const auto& tensor : bound.tensors) CHECK(tensor.slot_offset % bs::tensor_alignment == 0);
  CHECK_THROWS_AS(bs::bound_layout(wire, DType::i8), bs::ContractViolation);
}

TEST_CASE(
    "the finisher gives the same values as a conversion of each tensor, also in inference mode") {
  const auto wire = layout_of({{"w", DType::bf16, {3, 50}},
                               {"ids", DType::i64, {5}},
                               {"s", DType::f8_e5m2, {7}},
                               {"none", DType::bf16, {0, 3}}});
  auto bytes = patterned(wire.slot_byte_count[0]);
  const at::Tensor weight = bs::view_of(std::span{bytes}.first(300), wire.tensors[0].spec, cpu);
  weight.copy_(at::arange(150).view({3, 50}) * 0.37);
  const std::vector<bs::BlockLayout> wires{wire};
  bs::DTypeFinisher finisher{wires, DType::f32, cpu};
  const bs::BlockLayout& layout = finisher.layout(bs::block_at(0));
  std::vector<std::byte> bound(finisher.bound_byte_count({bs::block_at(0), 0}));
  int stream = 0;
  {
    const c10::InferenceMode inference;
    finisher.enqueue({bs::block_at(0), 0}, bytes, bound, stream);
  }
  const at::Tensor converted = bs::view_of(
      std::span{bound}.subspan(layout.tensors[0].slot_offset, 600), layout.tensors[0].spec, cpu);
  CHECK(at::equal(converted, weight.to(at::kFloat)));
  CHECK(std::memcmp(bound.data() + layout.tensors[1].slot_offset,
                    bytes.data() + wire.tensors[1].slot_offset, 40) == 0);
  CHECK(std::memcmp(bound.data() + layout.tensors[2].slot_offset,
                    bytes.data() + wire.tensors[2].slot_offset, 7) == 0);

  std::vector<std::byte> once(bound.size());
  bs::convert_block(bytes, wire, once, layout, cpu);
  CHECK(std::memcmp(once.data(), bound.data(), 600) == 0);
}

namespace {
struct Scale {
  using Hidden = at::Tensor;
  using Context = int;
  [[nodiscard]] std::vector<bs::WeightSpec> weight_specs() const { return {{"scale", {}}}; }
  at::Tensor forward(const bs::Weights& weights, const at::Tensor& hidden, int& visits) {
    ++visits;
    return hidden * weights[0];
  }
};
struct Shift {
  using Hidden = at::Tensor;
  using Context = int;
  [[nodiscard]] std::vector<bs::WeightSpec> weight_specs() const { return {{"shift", {2}}}; }
  at::Tensor forward(const bs::Weights& weights, const at::Tensor& hidden, int& visits) {
    ++visits;
    return hidden + weights[0];
  }
};
using Any = bs::AnyBlock<at::Tensor, int>;
static_assert(bs::streamable_block<Scale> && bs::streamable_block<Any>);
}  // namespace

TEST_CASE("blocks of different types run as one list") {
  std::vector<Any> blocks;
  blocks.emplace_back(Scale{});
  blocks.emplace_back(Shift{});
  CHECK(blocks[1].weight_specs()[0].name == "shift");
  const std::vector<std::vector<at::Tensor>> weights{{at::full({}, 3.0)}, {at::ones({2})}};
  int visits = 0;
  const at::Tensor out =
      bs::resident_forward(std::span{blocks}, std::span{weights}, at::ones({2}), visits);
  CHECK(at::equal(out, at::full({2}, 4.0)));
  CHECK(visits == 2);
}
