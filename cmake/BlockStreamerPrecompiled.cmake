# One precompiled header for every LibTorch unit of the tests and the program. Its headers cost 15-20 s a unit otherwise.
# block_streamer_use_torch(target) links LibTorch's level and uses it; warnings and sanitizers must be the same for all users.
option(BLOCK_STREAMER_PRECOMPILE "precompile LibTorch's headers for tests and examples" ON)

# GCC refuses a precompiled header whose flags differ in anything that a macro shows, -Wpedantic included.
function(_block_streamer_pch_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ccache can store a unit that uses a precompiled header only with this.
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()

if(BLOCK_STREAMER_PRECOMPILE)
  set(pch_unit ${CMAKE_BINARY_DIR}/precompiled/precompiled.cpp)
  file(CONFIGURE OUTPUT ${pch_unit} CONTENT "// Holds the precompiled header that the LibTorch units share.\n")
  add_library(block_streamer_torch_pch OBJECT EXCLUDE_FROM_ALL ${pch_unit})
  target_link_libraries(block_streamer_torch_pch PRIVATE block_streamer::block_streamer)
  target_precompile_headers(block_streamer_torch_pch PRIVATE
    <filesystem> <functional> <memory> <mutex> <optional> <span> <string> <utility> <vector>
    <ATen/core/Tensor.h> <ATen/TensorOperators.h> <ATen/TensorIndexing.h> <torch/csrc/autograd/custom_function.h>)
  _block_streamer_pch_options(block_streamer_torch_pch)
  if(BLOCK_STREAMER_SANITIZE)
    target_compile_options(block_streamer_torch_pch PRIVATE -fsanitize=${BLOCK_STREAMER_SANITIZE} -fno-omit-frame-pointer -g)
  endif()
  if(PROJECT_IS_TOP_LEVEL)
    set_property(TARGET block_streamer_torch_pch PROPERTY JOB_POOL_COMPILE torch_jobs)
  endif()
endif()

function(block_streamer_use_torch target)
  target_link_libraries(${target} PRIVATE block_streamer::block_streamer)
  if(TARGET block_streamer_torch_pch)
    target_precompile_headers(${target} REUSE_FROM block_streamer_torch_pch)
    _block_streamer_pch_options(${target})
  endif()
  if(PROJECT_IS_TOP_LEVEL)
    set_property(TARGET ${target} PROPERTY JOB_POOL_COMPILE torch_jobs)
  endif()
endfunction()
