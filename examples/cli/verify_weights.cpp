// SPDX-License-Identifier: Apache-2.0
#include "verify_weights.hpp"

#include "console.hpp"

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>

namespace bs = block_streamer;

namespace block_streamer_cli {
namespace {

constexpr std::size_t piece_byte_count = std::size_t{4} << 20;

/// The bits of the exponent: all of them set means infinite or no number.
std::optional<std::uint64_t> exponent_mask(bs::DType type) {
  switch (type) {
    case bs::DType::f16:
      return 0x7c00;
    case bs::DType::bf16:
      return 0x7f80;
    case bs::DType::f32:
      return 0x7f800000;
    case bs::DType::f64:
      return 0x7ff0000000000000;
    default:
      return std::nullopt;
  }
}

template <class Bits>
std::uint64_t scan(std::span<const std::byte> bytes, Bits mask, std::size_t& first) {
  std::uint64_t count = 0;
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(Bits)) {
    Bits bits{};
    std::memcpy(&bits, bytes.data() + at, sizeof bits);
    if ((bits & mask) != mask) continue;
    if (count++ == 0) first = at;
  }
  return count;
}

std::uint64_t scan(std::span<const std::byte> bytes, std::size_t item, std::uint64_t mask,
                   std::size_t& first) {
  if (item == 2) return scan(bytes, static_cast<std::uint16_t>(mask), first);
  if (item == 4) return scan(bytes, static_cast<std::uint32_t>(mask), first);
  return scan(bytes, mask, first);
}

}  // namespace

WeightCheck verify_weights(const bs::Checkpoint& checkpoint,
                           const std::vector<std::string>& names) {
  WeightCheck check;
  std::vector<std::byte> piece(piece_byte_count);
  Progress progress{"tensor", names.size()};
  for (const std::string& name : names) {
    const bs::StoredTensor& tensor = checkpoint.at(name);
    const auto mask = exponent_mask(tensor.spec.dtype);
    const std::filesystem::path& path = checkpoint.files()[tensor.file];
    const bs::File file = bs::File::open(path);
    NonFiniteTensor found{name, path.string(), 0, 0};
    for (std::uint64_t at = 0; at < tensor.range.byte_count; at += piece.size()) {
      const auto size = static_cast<std::size_t>(
          std::min<std::uint64_t>(piece.size(), tensor.range.byte_count - at));
      const std::uint64_t offset = tensor.range.offset + at;
      if (const std::error_code error = file.read_at(offset, std::span{piece}.first(size))) {
        throw bs::StorageError{
            path.string() + ", offset " + std::to_string(offset) + ", tensor " + name,
            "cannot be read", error};
      }
      std::size_t first = 0;
      const std::uint64_t count = mask ? scan(std::span{piece}.first(size),
                                              bs::byte_count_of(tensor.spec.dtype), *mask, first)
                                       : 0;
      if (count != 0 && found.count == 0) found.first_offset = offset + first;
      found.count += count;
    }
    check.bytes += tensor.range.byte_count;
    if (found.count != 0) check.non_finite.push_back(std::move(found));
    progress.update(++check.tensors, readable_bytes(check.bytes));
  }
  return check;
}

}  // namespace block_streamer_cli
