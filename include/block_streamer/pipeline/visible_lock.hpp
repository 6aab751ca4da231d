// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/device/host_edges.hpp>

#include <mutex>

namespace block_streamer::inline v1 {

/// @brief A lock that a checking backend sees: threads that hand over through a mutex are ordered
/// by it, which only the mutex knows. Costs nothing with any other backend.
template <execution_backend Backend>
class VisibleLock {
 public:
  VisibleLock(std::mutex& mutex, Backend& backend) : lock_{mutex}, backend_{backend} {
    accept_host_edge(backend_, lock_.mutex());
  }
  VisibleLock(const VisibleLock&) = delete;
  VisibleLock& operator=(const VisibleLock&) = delete;
  ~VisibleLock() { publish_host_edge(backend_, lock_.mutex()); }

 private:
  std::unique_lock<std::mutex> lock_;
  Backend& backend_;
};

}  // namespace block_streamer::inline v1
