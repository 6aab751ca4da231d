#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the tests; sets up what they need first (examples/setup.sh).
#
#   tests/run.sh           release tests (g++), torch-free ranks under sanitizers (clang), consumers, layering
#   tests/run.sh --quick   the release tests alone
#   tests/run.sh --full    also clang, clang-tidy, every header alone, clang-format
#
# Stops at the first stage that fails. Ends with the release tests' summary.
# JOBS: how many units to compile at a time (default: one a core).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=normal
case "${1:-}" in
  "") ;;
  --quick | --full) mode=${1#--} ;;
  *) sed -n '3,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

. examples/setup.sh

stage() { # name, command…
  local name=$1 started=$SECONDS
  shift
  setup_say "$name"
  "$@" || { setup_say "FAILED: $name"; exit 1; }
  setup_say "$name: $((SECONDS - started)) s"
}

run_ctest() { # preset [ctest arguments…]
  local preset=$1
  shift
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -j "$(nproc)" "$@"
}

sanitized() { # preset
  setup_configure "$1"
  setup_build "$1"
  # Only what is compiled with the sanitizer: consumers and scripts gain nothing from it.
  run_ctest "$1" --label-exclude '^(consumer|layering)$'
}

clang_build() {
  setup_configure clang -DTorch_DIR="$SETUP_TORCH_DIR"
  setup_build clang
  run_ctest clang --label-exclude '^(consumer|layering|slow)$'
}

fuzz_smoke() { # a fixed number of runs of each target
  setup_configure fuzz
  setup_build fuzz fuzzers
  run_ctest fuzz --label-regex '^fuzz$'
}

format_check() {
  git ls-files -co --exclude-standard '*.hpp' '*.cpp' | xargs -r clang-format --dry-run -Werror
}

main() {
  local group=tests
  [ "$mode" = quick ] && group=base
  [ "$mode" = full ] && group=full
  setup_announce "$group"
  setup_packages "$group"
  setup_torch
  export BLOCK_STREAMER_SMOLLM2=${BLOCK_STREAMER_SMOLLM2:-$SETUP_ROOT/models/SmolLM2-135M-Instruct}
  setup_model "$BLOCK_STREAMER_SMOLLM2"

  if [ "$mode" != quick ]; then
    stage "address and undefined-behaviour sanitizers" sanitized asan
    stage "thread sanitizer" sanitized tsan
  fi
  if [ "$mode" = full ]; then
    stage "clang-format" format_check
    stage "clang" clang_build
    stage "fuzz targets" fuzz_smoke
  fi
  setup_configure release -DTorch_DIR="$SETUP_TORCH_DIR"
  stage "release build" setup_build release
  if [ "$mode" = full ]; then
    stage "every header alone" setup_build release headers_alone
    stage "clang-tidy" setup_build clang clang_tidy
  fi
  setup_say "release tests"
  if [ "$mode" = quick ]; then
    run_ctest release --label-exclude '^(consumer|layering)$'
  else
    run_ctest release
  fi
}

main
