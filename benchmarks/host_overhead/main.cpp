// SPDX-License-Identifier: Apache-2.0
#include "host_overhead.hpp"

#include <block_streamer/device/host_backend.hpp>

namespace {

using namespace block_streamer_benchmarks;

/// Copies nothing: what remains is bookkeeping alone.
class NullBackend : public bs::HostBackend {
 public:
  using HostBackend::HostBackend;
  void copy_async(std::span<std::byte>, std::span<const std::byte>, bs::CopyDirection, Stream&) {}
};
static_assert(bs::execution_backend<NullBackend>);

template <class Backend>
void add(Report& report, const std::string& name, const std::string& what, bool probe) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [&report, what, probe](benchmark::State& state) {
                                 const Backend backend{};
                                 visit_tiny_blocks(state, report, what, backend,
                                                   probe ? bare_calls_s(backend) : 0);
                               })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  Report report;
  add<NullBackend>(report, "visit/ram_4KiB/null_copy", "copies replaced by nothing", false);
  add<bs::HostBackend>(report, "visit/ram_4KiB/host", "attached host", true);
#ifdef BLOCK_STREAMER_HAS_CUDA
  register_cuda_visits(report);
#endif
  benchmark::RunSpecifiedBenchmarks();
  report.print();
  return 0;
}
