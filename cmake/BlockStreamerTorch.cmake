# LibTorch as an imported target of our own (block_streamer_torch), found through Torch_DIR or CMAKE_PREFIX_PATH.
# The wheel's own TorchConfig insists on an installed CUDA toolkit; its headers and libraries do not.
find_path(BLOCK_STREAMER_TORCH_INCLUDE NAMES ATen/ATen.h
  HINTS ${Torch_DIR}/../../../include ${CMAKE_PREFIX_PATH} PATH_SUFFIXES include ../../include REQUIRED)
find_library(BLOCK_STREAMER_TORCH_CPU torch_cpu HINTS ${BLOCK_STREAMER_TORCH_INCLUDE}/../lib REQUIRED)
find_library(BLOCK_STREAMER_C10 c10 HINTS ${BLOCK_STREAMER_TORCH_INCLUDE}/../lib REQUIRED)
get_filename_component(BLOCK_STREAMER_TORCH_LIB_DIR ${BLOCK_STREAMER_TORCH_CPU} DIRECTORY)

add_library(block_streamer_torch INTERFACE)
target_include_directories(block_streamer_torch SYSTEM INTERFACE
  ${BLOCK_STREAMER_TORCH_INCLUDE} ${BLOCK_STREAMER_TORCH_INCLUDE}/torch/csrc/api/include)
target_link_libraries(block_streamer_torch INTERFACE ${BLOCK_STREAMER_TORCH_CPU} ${BLOCK_STREAMER_C10})
target_link_options(block_streamer_torch INTERFACE -Wl,-rpath,${BLOCK_STREAMER_TORCH_LIB_DIR})
