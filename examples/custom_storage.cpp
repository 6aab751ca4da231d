// SPDX-License-Identifier: Apache-2.0
// A storage tier of one's own: weights lie encrypted on disk and are decrypted as they arrive.
// The program writes a small encrypted checkpoint, streams its blocks, compares every byte, and
// runs the suite that every storage tier has to pass.
#include <block_streamer/checkpoint/block_map.hpp>
#include <block_streamer/checkpoint/checkpoint.hpp>
#include <block_streamer/checkpoint/safetensors_writer.hpp>
#include <block_streamer/storage/any_storage.hpp>
#include <block_streamer/storage/async_read.hpp>
#include <block_streamer/storage/file_storage.hpp>
#include <block_streamer/testing/storage_conformance.hpp>

#include <boost/asio/use_future.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

namespace bs = block_streamer;

/// A stand-in for a cipher whose key stream can be entered at any byte, as in counter mode. It is
/// keyed by image offset, so pieces of a block may be read in any order.
std::byte key_stream(std::uint64_t key, bs::BlockId block, std::uint64_t image_offset) {
  std::uint64_t x = key ^ (bs::index_of(block) << 48) ^ image_offset;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  return static_cast<std::byte>((x ^ (x >> 27)) * 0x94D049BB133111EBULL >> 56);
}

// The tier, whole.
template <bs::storage_tier Inner>
class DecryptingStorage {
 public:
  DecryptingStorage(Inner inner, std::uint64_t key) : inner_{std::move(inner)}, key_{key} {}
  std::size_t block_count() const noexcept { return inner_.block_count(); }
  const bs::BlockImage& image(bs::BlockId block) const noexcept { return inner_.image(block); }
  void async_read(bs::BlockId block, bs::ByteRange range, std::span<std::byte> out,
                  bs::IoCompletion done) noexcept {
    inner_.async_read(block, range, out,
                      [key = key_, block, at = range.offset, out, done = std::move(done)](
                          std::error_code error, std::size_t n) mutable {
                        for (std::size_t i = 0; i < n; ++i)
                          out[i] ^= key_stream(key, block, at + i);
                        done(error, n);
                      });
  }

 private:
  Inner inner_;
  std::uint64_t key_;
};
static_assert(bs::storage_tier<DecryptingStorage<bs::FileStorage>>);

namespace {

constexpr std::uint64_t key = 0x5EED;
constexpr std::size_t tensor_byte_count = 1000;  // 250 floats: one tensor per block

std::byte weight(std::size_t block, std::size_t offset) {
  return static_cast<std::byte>(block * 37 + offset * 11 + offset / 251);
}

std::vector<bs::BlockTensors> write_checkpoint(const std::filesystem::path& path) {
  constexpr std::size_t block_count = 3;
  std::vector<bs::BlockTensors> blocks;
  std::array<std::vector<std::byte>, block_count> encrypted;
  std::vector<bs::TensorBytes> tensors;
  for (std::size_t b = 0; b < block_count; ++b) {
    for (std::size_t i = 0; i < tensor_byte_count; ++i) {
      encrypted[b].push_back(weight(b, i) ^ key_stream(key, bs::block_at(b), i));
    }
    blocks.push_back({"layers." + std::to_string(b) + ".", {"weight"}});
    tensors.push_back({{blocks[b].prefix + "weight", bs::DType::f32, {25, 10}}, encrypted[b]});
  }
  bs::write_safetensors(path, tensors);
  return blocks;
}

/// Reads every block in two pieces and compares.
bool stream(bs::AnyStorage tier) {
  for (std::size_t b = 0; b < tier.block_count(); ++b) {
    std::vector<std::byte> bytes(tier.image(bs::block_at(b)).byte_count);
    const std::size_t half = bytes.size() / 2;
    const auto out = std::span{bytes};
    auto back = bs::async_read(tier, bs::block_at(b), {half, bytes.size() - half},
                               out.subspan(half), boost::asio::use_future);
    auto front =
        bs::async_read(tier, bs::block_at(b), {0, half}, out.first(half), boost::asio::use_future);
    if (front.get() + back.get() != tensor_byte_count) return false;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != weight(b, i)) return false;
    }
  }
  return true;
}

/// What each block should hold.
bs::testing::Images expected_images(std::size_t block_count) {
  bs::testing::Images images(block_count, std::vector<std::byte>(tensor_byte_count));
  for (std::size_t b = 0; b < block_count; ++b) {
    for (std::size_t i = 0; i < tensor_byte_count; ++i) images[b][i] = weight(b, i);
  }
  return images;
}

}  // namespace

int main() try {
  const auto path =
      std::filesystem::temp_directory_path() / "block_streamer_custom_storage.safetensors";
  const std::vector<bs::BlockTensors> blocks = write_checkpoint(path);
  const bs::BlockMap map = bs::make_block_map(bs::Checkpoint::open(path), blocks);
  const bool plain = stream(bs::FileStorage{map});
  const bool decrypted = stream(DecryptingStorage{bs::FileStorage{map}, key});
  const auto report = [](const bs::testing::Finding& f) {
    std::cerr << f.promise << ": " << f.found << '\n';
  };
  const auto conforms = bs::testing::check_storage_tier(
      DecryptingStorage{bs::FileStorage{map}, key}, expected_images(map.blocks().size()), report);
  std::filesystem::remove(path);
  std::cout << map.blocks().size() << " blocks, " << (decrypted ? "decrypted" : "NOT decrypted")
            << ", " << conforms.promises - conforms.broken << " of " << conforms.promises
            << " promises kept\n";
  return decrypted && !plain && conforms ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
