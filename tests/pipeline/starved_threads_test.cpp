// SPDX-License-Identifier: Apache-2.0
// Long runs with too little staging on real threads: reads are late and reordered, the device is
// behind, passes are given up, hints are wrong. Slots hold poison while they are refilled.
#include <block_streamer/device/host_backend.hpp>
#include <block_streamer/pipeline/pass.hpp>
#include <block_streamer/storage/decorators/faulty_storage.hpp>
#include <block_streamer/storage/pooled.hpp>

#include <support/catch.hpp>

#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "plain_images.hpp"
#include "random_visits.hpp"
#include "scripted_tier.hpp"

namespace bs = block_streamer;
using namespace support;

namespace {

struct PatternReader {
  std::shared_ptr<std::vector<bs::BlockImage>> images;
  [[nodiscard]] std::size_t block_count() const noexcept { return images->size(); }
  [[nodiscard]] const bs::BlockImage& image(bs::BlockId b) const noexcept {
    return (*images)[bs::index_of(b)];
  }
  std::error_code read(bs::BlockId b, bs::ByteRange r, std::span<std::byte> out) {
    std::ranges::fill(out, std::byte{0xDB});
    fill_image(b, r, out);
    return {};
  }
};

/// Fills the target with poison, in the order of the stream, before each copy into it; and now and
/// then holds a stream for as long as the next few calls take.
class RoughBackend : public bs::HostBackend {
 public:
  RoughBackend() : bs::HostBackend{bs::HostMode::detached} {}
  void copy_async(std::span<std::byte> to, std::span<const std::byte> from,
                  bs::CopyDirection direction, Stream& stream) {
    if (direction == bs::CopyDirection::host_to_device) {
      bs::HostBackend::copy_async(to, std::span{poison_->data(), to.size()}, direction, stream);
    }
    bs::HostBackend::copy_async(to, from, direction, stream);
  }

 private:
  std::shared_ptr<std::vector<std::byte>> poison_ =
      std::make_shared<std::vector<std::byte>>(1 << 16, std::byte{0xDE});
};

/// What a visit does: copies its bytes out on the compute stream, which may be held meanwhile.
struct Kept {
  std::size_t block;
  std::vector<std::byte> bytes;
};

}  // namespace

TEST_CASE("b71 on threads: two staging chunks, late and reordered reads, a device that is behind") {
  const auto images = std::make_shared<std::vector<bs::BlockImage>>(
      plain_blocks({3000, 0, 2500, 1001, 999, 1, 2000, 1000, 6400}));
  for (std::uint32_t ahead = 0; ahead <= 2; ++ahead) {
    std::mt19937 random{ahead + 1};
    bs::FaultScript script;
    for (std::uint64_t n = 0; n < 5000; n += 1 + random() % 5) script.delay(n, 1 + random() % 3);
    RoughBackend backend;
    Bound bound{ahead + 1, 0, 0};
    std::deque<Kept> kept;
    {
      auto compute = backend.make_stream();
      bs::PipelineOptions options;
      options.prefetch_ahead = ahead;
      options.chunk_byte_count = 1000;
      options.staging_byte_count = 2 * 1000;
      options.observer = bound;
      bs::BlockPipeline<RoughBackend> pipeline{
          bs::FaultyStorage{bs::Pooled{PatternReader{images}, 3}, script}, backend, options};
      for (int iteration = 0; iteration < 100; ++iteration) {
        const Whim whim = whim_of(random, images->size());
        {
          auto pass = pipeline.begin_pass(whim.order, whim.hint, compute);
          for (std::size_t i = 0; !pass.done() && i < whim.stop_at; ++i) {
            const auto lease = pass.acquire();
            const bool behind = random() % 2 == 0;
            if (behind) backend.pause(compute);
            kept.push_back(
                {bs::index_of(lease.part().block), std::vector<std::byte>(lease.bytes().size())});
            backend.copy_async(kept.back().bytes, lease.bytes(), bs::CopyDirection::device_to_host,
                               compute);
            if (behind) backend.resume(compute);
          }
        }
      }
      pipeline.drain();
      auto over = backend.make_event();
      backend.record(over, compute);
      backend.synchronize(over);
    }
    std::size_t wrong = 0;
    for (const Kept& visit : kept)
      wrong += slot_is_right((*images)[visit.block], visit.block, visit.bytes) ? 0 : 1;
    CHECK(wrong == 0);
    CHECK(bound.broken == 0);
    CHECK(bound.resident <= ahead + 1);
  }
}
