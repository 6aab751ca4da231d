# Precompiled headers: one for the LibTorch units of programs, one for those of tests (LibTorch's headers cost 15-20 s a unit
# otherwise), and one each for the tests of core and io (BlockStreamerTest.cmake). Warnings and sanitizers must be the same for all users.
# block_streamer_use_torch(target) links LibTorch's level and uses its header.
option(BLOCK_STREAMER_PRECOMPILE "precompile common headers for tests and examples" ON)

# GCC refuses a precompiled header whose flags differ in anything that a macro shows, -Wpedantic included.
function(_block_streamer_pch_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ccache can store a unit that uses a precompiled header only with this.
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  else()
    target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
  endif()
endfunction()

# A target that others take their precompiled header from.
function(_block_streamer_add_pch name)
  set(pch_unit ${CMAKE_BINARY_DIR}/precompiled/precompiled.cpp)
  file(CONFIGURE OUTPUT ${pch_unit} CONTENT "// Holds a precompiled header that other units share.\n")
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${pch_unit})
  target_precompile_headers(${name} PRIVATE ${ARGN})
  _block_streamer_pch_options(${name})
endfunction()

function(_block_streamer_add_torch_pch name)
  _block_streamer_add_pch(${name}
    <filesystem> <functional> <memory> <mutex> <optional> <span> <string> <utility> <vector>
    <ATen/core/Tensor.h> <ATen/TensorOperators.h> <ATen/TensorIndexing.h> <torch/csrc/autograd/custom_function.h>)
  target_link_libraries(${name} PRIVATE block_streamer::block_streamer)
  if(BLOCK_STREAMER_SANITIZE)
    target_compile_options(${name} PRIVATE -fsanitize=${BLOCK_STREAMER_SANITIZE} -fno-omit-frame-pointer)
  endif()
  if(PROJECT_IS_TOP_LEVEL)
    set_property(TARGET ${name} PROPERTY JOB_POOL_COMPILE torch_jobs)
  endif()
endfunction()
if(BLOCK_STREAMER_PRECOMPILE AND BLOCK_STREAMER_WITH_TORCH)
  _block_streamer_add_torch_pch(block_streamer_torch_pch)
endif()

# pch: the target whose precompiled header it uses (default: block_streamer_torch_pch).
function(block_streamer_use_torch target)
  set(pch block_streamer_torch_pch)
  if(ARGC GREATER 1)
    set(pch ${ARGV1})
  endif()
  target_link_libraries(${target} PRIVATE block_streamer::block_streamer)
  if(TARGET ${pch})
    target_precompile_headers(${target} REUSE_FROM ${pch})
    _block_streamer_pch_options(${target})
  endif()
  if(PROJECT_IS_TOP_LEVEL)
    set_property(TARGET ${target} PROPERTY JOB_POOL_COMPILE torch_jobs)
  endif()
endfunction()
