// SPDX-License-Identifier: Apache-2.0
// Long runs with too little staging: everything takes a random time, passes are given up, hints are
// wrong, blocks throw. In virtual time a thousand odd timings cost nothing; on real threads:
// tests/pipeline/starved_threads_test.cpp.
#include <support/catch.hpp>

#include <pipeline/random_visits.hpp>
#include <random>

#include "simulated_run.hpp"

namespace bs = block_streamer;
using namespace support;

TEST_CASE("in virtual time: 100 starved iterations for every depth") {
  constexpr std::size_t blocks = 9;
  std::size_t passes = 0, visits = 0;
  for (std::uint32_t ahead = 0; ahead <= 4; ++ahead) {
    for (const std::uint32_t tickets : {1U, 2U}) {
      for (const bool late_loop : {false, true}) {
        std::mt19937 random{ahead * 4 + tickets * 2 + late_loop};
        const auto images = plain_blocks({300, 0, 250, 101, 99, 1, 200, 100, 640});
        Bound bound;
        std::size_t wrong = 0;
        bs::VirtualClock clock{[&](std::size_t) { return std::size_t{random()}; }, late_loop};
        bs::DriveModel drive;
        drive.one_link = false;
        drive.delay = [&](std::uint64_t) { return Nanoseconds{random() % 50}; };
        bs::DeviceModel device;
        device.copy_in = {std::uint64_t{5'000'000'000}, 3ns};
        bs::SimulatedBackend backend{clock, device};
        bs::PipelineOptions options;
        options.prefetch_ahead = ahead;
        options.chunk_byte_count = 100;
        options.staging_byte_count = tickets * 100;
        options.device_budget = 2 * 768;
        options.observer = bound;
        {
          auto compute = backend.make_stream();
          bs::BlockPipeline<bs::SimulatedBackend, bs::VirtualLoop> pipeline{
              bs::SimulatedStorage{clock, images, drive, fill_image}, backend, options, nullptr,
              std::make_unique<bs::VirtualLoop>(clock)};
          bound.slots = pipeline.slot_count();
          for (int iteration = 0; iteration < 100; ++iteration, ++passes) {
            const Whim whim = whim_of(random, blocks);
            try {
              auto pass = pipeline.begin_pass(whim.order, whim.hint, compute);
              for (std::size_t i = 0; !pass.done() && i < whim.stop_at; ++i, ++visits) {
                auto lease = pass.acquire();
                const std::size_t block = bs::index_of(lease.part().block);
                backend.compute(compute, lease.part(), Nanoseconds{random() % 60},
                                [&, block, bytes = lease.bytes()] {
                                  wrong += slot_is_right(images[block], block, bytes) ? 0 : 1;
                                });
                if (random() % 4 == 0) clock.advance(Nanoseconds{random() % 100});
                if (whim.throws && random() % 4 == 0) throw std::runtime_error{"the block failed"};
              }
            } catch (const std::runtime_error&) {
            }
          }
          pipeline.drain();
          clock.run_dry();
        }
        CHECK(wrong == 0);
        CHECK(bound.broken == 0);
      }
    }
  }
  WARN(passes << " passes, " << visits << " visits");
}
