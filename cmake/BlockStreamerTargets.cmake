# The interface targets: core (torch-free, Asio-free) < io (adds Boost.Asio) < block_streamer (adds LibTorch), and beside them
# cuda and torch_cuda when CUDA is used. Third-party targets are global, so that a parent project sees them too.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
find_package(Threads REQUIRED)
if(MINGW AND CMAKE_CROSSCOMPILING)
  include(BlockStreamerHeaderLinks)
  # No distribution packages these two for mingw-w64. Without them everything is there but text/.
  find_package(PCRE2 QUIET)
  find_package(utf8proc QUIET)
else()
  find_package(nlohmann_json 3.10 REQUIRED)
  find_package(PCRE2 REQUIRED)
  find_package(utf8proc REQUIRED)
  find_package(Boost 1.81 REQUIRED CONFIG)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/headers.cmake)

# block_streamer_add_library(core HEADERS … LIBRARIES …)
function(block_streamer_add_library name)
  cmake_parse_arguments(L "" "" "HEADERS;LIBRARIES" ${ARGN})
  if(name STREQUAL "block_streamer")
    set(target block_streamer)
  else()
    set(target block_streamer_${name})
  endif()
  add_library(${target} INTERFACE)
  add_library(block_streamer::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  list(TRANSFORM L_HEADERS PREPEND ${PROJECT_SOURCE_DIR}/include/block_streamer/)
  target_sources(${target} INTERFACE FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES ${L_HEADERS})
  target_link_libraries(${target} INTERFACE ${L_LIBRARIES})
endfunction()

block_streamer_add_library(core HEADERS ${BLOCK_STREAMER_CORE_HEADERS} ${BLOCK_STREAMER_CUDA_HEADERS}
  LIBRARIES Threads::Threads nlohmann_json::nlohmann_json)
if(PCRE2_FOUND AND utf8proc_FOUND)
  target_link_libraries(block_streamer_core INTERFACE PCRE2::8BIT utf8proc::utf8proc)
endif()
target_compile_features(block_streamer_core INTERFACE cxx_std_20)
include(BlockStreamerUring)
block_streamer_add_library(io HEADERS ${BLOCK_STREAMER_IO_HEADERS}
  LIBRARIES block_streamer_core Boost::headers block_streamer_uring)
# See include/block_streamer/io/asio_threads.hpp.
target_compile_definitions(block_streamer_io INTERFACE
  $<$<AND:$<PLATFORM_ID:Windows>,$<CXX_COMPILER_ID:GNU>>:BOOST_ASIO_HAS_PTHREADS=1>)
target_link_libraries(block_streamer_io INTERFACE $<$<PLATFORM_ID:Windows>:ws2_32> $<$<PLATFORM_ID:Windows>:mswsock>)

if(BLOCK_STREAMER_WITH_TORCH)
  include(BlockStreamerTorch)
  block_streamer_add_library(block_streamer HEADERS ${BLOCK_STREAMER_TORCH_HEADERS} ${BLOCK_STREAMER_TORCH_CUDA_HEADERS}
    LIBRARIES block_streamer_io block_streamer_torch)
endif()
include(BlockStreamerCuda)
