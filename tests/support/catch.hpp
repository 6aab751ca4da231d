// SPDX-License-Identifier: Apache-2.0
// The one place that knows which Catch2 is installed: v2 (Debian 12) or v3 (Ubuntu 24.04).
// In LibTorch tests include ATen first and this header last: c10 defines CHECK as well, ours must
// win.
#pragma once

#ifdef CHECK
#undef CHECK
#endif
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
#include <string>

/// v3's name: there, Contains is for ranges.
inline auto ContainsSubstring(const std::string& text) {
  return Catch::Matchers::Contains(text);
}
#endif
