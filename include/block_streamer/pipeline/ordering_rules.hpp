// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace block_streamer::inline v1 {

/// @brief The ordering rules of the pipeline, as a policy. Programs use this one; a test derives
/// from it and switches one rule off, to show that the proof of that rule fails without it.
struct AllOrderingRules {
  /// 1. The copy stream waits, on the device, for the release of the residency that a copy
  /// overwrites.
  static constexpr bool wait_for_release = true;
  /// 2. A fetch begins only after its slot's release was issued by the caller.
  static constexpr bool begin_after_release = true;
  /// 3. Copies are issued in plan order, not in order of arrival.
  static constexpr bool copy_in_plan_order = true;
  /// 4. For a tier in RAM the visitor enqueues the copies; otherwise the I/O loop does. Never both.
  static constexpr bool visitor_copies_ram = true;
  /// 5. A pass's own copies come after everything that was computed before it.
  static constexpr bool fork_copies = true;
  /// 6. A lease records its release on every path, exceptions included.
  static constexpr bool release_always = true;
};

}  // namespace block_streamer::inline v1
