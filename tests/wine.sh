#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The torch-free ranks on Windows, as far as wine stands for it: cross-compiled with mingw-w64, tests run under wine.
#
#   tests/wine.sh                  installs what is missing, builds (preset mingw), runs the tests (ctest -L wine)
#   tests/wine.sh setup            installs only: Debian packages, 170 MB to download, 1.1 GB of disk
#   tests/wine.sh run PROGRAM …    runs a Windows program; ctest starts the tests with it
#
# JOBS: how many units to compile at a time (default: one a core).
# BLOCK_STREAMER_WINE_PREFIX: where wine keeps its Windows folders, 0.7 GB (default: build/wine).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

export WINEPREFIX=${BLOCK_STREAMER_WINE_PREFIX:-$root/build/wine}
export WINEDEBUG=${WINEDEBUG:--all}
# No questions about Mono and Gecko, which nothing here needs.
export WINEDLLOVERRIDES="mscoree=d;mshtml=d"

wine_setup() {
  local package missing=()
  for package in g++ cmake ninja-build ccache nlohmann-json3-dev catch2 g++-mingw-w64-x86-64-posix wine wine64 \
    "$([ -e /usr/include/boost/version.hpp ] || echo libboost1.81-dev)"; do
    [ -z "$package" ] && continue
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo -n)
    sudo -n true 2>/dev/null || {
      printf 'packages are missing and there is no right to install them. Run this once:\n  sudo apt-get update && sudo apt-get install --no-install-recommends -y %s\n' "${missing[*]}" >&2
      exit 1
    }
  fi
  printf '== installing Debian packages: %s\n' "${missing[*]}" >&2
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=600 "${missing[@]}" >/dev/null
}

# Windows' folders, made once: tests that start together would each wait for it.
wine_prefix() {
  [ -e "$WINEPREFIX/system.reg" ] && return
  mkdir -p "$WINEPREFIX"
  wineboot -i >/dev/null 2>&1 || { printf 'wine cannot make its folders in %s\n' "$WINEPREFIX" >&2; exit 1; }
  wineserver -w
}

case "${1:-}" in
  run)
    shift
    exec wine "$@"
    ;;
  setup)
    wine_setup
    ;;
  "")
    wine_setup
    cd "$root"
    cmake --preset mingw
    cmake --build build/mingw -j "${JOBS:-$(nproc)}"
    wine_prefix
    # One server for all tests: it would otherwise end and start again between two of them. What Windows runs beside every
    # program begins with the first one and keeps its output open: that must not be a test's, or ctest waits for it.
    wineserver -p </dev/null >/dev/null 2>&1
    wine cmd /c exit </dev/null >/dev/null 2>&1
    trap 'wineserver -k || true' EXIT
    ctest --test-dir build/mingw -L wine --output-on-failure --no-tests=error -j "${JOBS:-$(nproc)}"
    ;;
  *)
    sed -n '3,10s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
