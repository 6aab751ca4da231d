// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>

namespace block_streamer::inline v1 {

/// @brief A lock that a checking backend sees: threads that hand over through a mutex are ordered
/// by it, which only the mutex knows. Costs nothing with any other backend.
template <class Backend>
class VisibleLock {
 public:
  VisibleLock(std::mutex& mutex, Backend& backend) : lock_{mutex}, backend_{backend} {
    if constexpr (requires { backend.host_acquire(&mutex); }) backend_.host_acquire(&mutex);
  }
  VisibleLock(const VisibleLock&) = delete;
  VisibleLock& operator=(const VisibleLock&) = delete;
  ~VisibleLock() {
    if constexpr (requires(Backend & b, std::mutex * m) { b.host_release(m); }) {
      backend_.host_release(lock_.mutex());
    }
  }

 private:
  std::unique_lock<std::mutex> lock_;
  Backend& backend_;
};

}  // namespace block_streamer::inline v1
