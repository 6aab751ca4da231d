# LibTorch as an imported target of our own: block_streamer_torch (block_streamer::torch). Found through Torch_DIR,
# CMAKE_PREFIX_PATH or the checkout's .venv. The wheel's own TorchConfig insists on an installed CUDA toolkit; its headers and
# libraries do not. Included by the build and by the installed package alike.
#
# Sets BLOCK_STREAMER_TORCH_INCLUDE, BLOCK_STREAMER_TORCH_LIB_DIR, BLOCK_STREAMER_TORCH_VERSION and
# BLOCK_STREAMER_TORCH_CUDA (the version of CUDA that LibTorch was built for, as "13.0"; empty for a CPU build).
include_guard(GLOBAL)

# A folder is one LibTorch, headers and libraries together; mixing two would crash at run time.
function(_block_streamer_find_torch result)
  set(candidates "")
  foreach(prefix IN ITEMS ${Torch_DIR} $ENV{Torch_DIR})
    list(APPEND candidates ${prefix}/../../.. ${prefix})
  endforeach()
  string(REPLACE ":" ";" from_environment "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH from_environment)
    # The wheel's torch.utils.cmake_prefix_path is …/torch/share/cmake.
    list(APPEND candidates ${prefix} ${prefix}/../.. ${prefix}/torch ${prefix}/libtorch)
  endforeach()
  file(GLOB in_venv ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../.venv/lib/python3*/site-packages/torch)
  foreach(candidate IN LISTS candidates in_venv)
    if(EXISTS ${candidate}/include/ATen/core/Tensor.h)
      get_filename_component(candidate ${candidate} REALPATH)
      set(${result} ${candidate} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(FATAL_ERROR "block_streamer: LibTorch is not found. Run examples/setup.sh, or point Torch_DIR or CMAKE_PREFIX_PATH "
    "to one (python3 -c 'import torch; print(torch.utils.cmake_prefix_path)'), or build without it: "
    "-DBLOCK_STREAMER_WITH_TORCH=OFF")
endfunction()

function(_block_streamer_check_torch root)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS ${root}/include/${header})
      file(STRINGS ${root}/include/${header} lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
      if(lines)
        break()
      endif()
    endif()
  endforeach()
  if(NOT "${lines}" MATCHES "MAJOR +([0-9]+).*MINOR +([0-9]+).*PATCH +([0-9]+)")
    message(FATAL_ERROR "block_streamer: cannot read the version of the LibTorch in ${root}")
  endif()
  set(version ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3})
  if(version VERSION_LESS 2.4)
    message(FATAL_ERROR "block_streamer: the LibTorch in ${root} is ${version}; 2.4 or newer is needed.")
  endif()
  # A function that takes a std::string tells the ABI by its mangled name.
  file(STRINGS ${root}/lib/libc10.so symbols REGEX "torchCheckFail.*__cxx11" LIMIT_COUNT 1)
  if(NOT symbols)
    message(FATAL_ERROR "block_streamer: the LibTorch in ${root} is built with the pre-C++11 ABI "
      "(_GLIBCXX_USE_CXX11_ABI=0) and cannot be linked here. Use the cxx11-ABI build, or the PyPI wheel from version 2.7 on.")
  endif()
  set(BLOCK_STREAMER_TORCH_VERSION ${version} PARENT_SCOPE)
endfunction()

# The wheel records its CUDA version beside the headers; a LibTorch archive only in its build-version file.
function(_block_streamer_torch_cuda root result)
  set(${result} "" PARENT_SCOPE)
  if(NOT EXISTS ${root}/lib/libtorch_cuda.so)
    return()
  endif()
  if(EXISTS ${root}/version.py)
    file(STRINGS ${root}/version.py line REGEX "^cuda" LIMIT_COUNT 1)
    if("${line}" MATCHES "'([0-9]+\\.[0-9]+)")
      set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
      return()
    endif()
  endif()
  if(EXISTS ${root}/build-version)
    file(STRINGS ${root}/build-version line LIMIT_COUNT 1)
    if("${line}" MATCHES "cu([0-9]+)([0-9])$")
      set(${result} ${CMAKE_MATCH_1}.${CMAKE_MATCH_2} PARENT_SCOPE)
    endif()
  endif()
endfunction()

_block_streamer_find_torch(BLOCK_STREAMER_TORCH_ROOT)
_block_streamer_check_torch(${BLOCK_STREAMER_TORCH_ROOT})
_block_streamer_torch_cuda(${BLOCK_STREAMER_TORCH_ROOT} BLOCK_STREAMER_TORCH_CUDA)
set(BLOCK_STREAMER_TORCH_INCLUDE ${BLOCK_STREAMER_TORCH_ROOT}/include)
set(BLOCK_STREAMER_TORCH_LIB_DIR ${BLOCK_STREAMER_TORCH_ROOT}/lib)

add_library(block_streamer_torch INTERFACE IMPORTED GLOBAL)
add_library(block_streamer::torch ALIAS block_streamer_torch)
target_include_directories(block_streamer_torch SYSTEM INTERFACE
  ${BLOCK_STREAMER_TORCH_INCLUDE} ${BLOCK_STREAMER_TORCH_INCLUDE}/torch/csrc/api/include)
target_link_libraries(block_streamer_torch INTERFACE
  ${BLOCK_STREAMER_TORCH_LIB_DIR}/libtorch_cpu.so ${BLOCK_STREAMER_TORCH_LIB_DIR}/libc10.so)
target_link_options(block_streamer_torch INTERFACE "LINKER:-rpath,${BLOCK_STREAMER_TORCH_LIB_DIR}")
message(STATUS "block_streamer: LibTorch ${BLOCK_STREAMER_TORCH_VERSION} in ${BLOCK_STREAMER_TORCH_ROOT}")
