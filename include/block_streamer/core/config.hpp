// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#if !defined(__cpp_concepts) || __cplusplus < 202002L
#error "block_streamer needs C++20: compile with -std=c++20 (g++ 12, clang 14 or newer)"
#endif

/// Every declaration lives in an inline namespace that changes with the ABI, so two versions of
/// this header-only library can be linked into one program without merging their inline functions.
namespace block_streamer::inline v1 {

inline constexpr int version_major = 0;
inline constexpr int version_minor = 1;
inline constexpr int version_patch = 0;
inline constexpr std::string_view version_string = "0.1.0";

/// Alignment of every tensor in a slot, in bytes: enough for the widest vector loads and for tensor
/// cores.
inline constexpr std::size_t tensor_alignment = 256;

}  // namespace block_streamer::inline v1
