// SPDX-License-Identifier: Apache-2.0
// Catch2 v2 has no compiled main; with v3 the package's own is linked instead.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
