# The three interface targets: core (torch-free, Asio-free) < io (adds Boost.Asio) < block_streamer (adds LibTorch).
find_package(Threads REQUIRED)
find_package(nlohmann_json 3.10 REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
find_package(Boost 1.81 REQUIRED CONFIG)

add_library(block_streamer_core INTERFACE)
add_library(block_streamer::core ALIAS block_streamer_core)
target_include_directories(block_streamer_core INTERFACE
  $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
target_compile_features(block_streamer_core INTERFACE cxx_std_20)
target_link_libraries(block_streamer_core INTERFACE Threads::Threads nlohmann_json::nlohmann_json
  PkgConfig::PCRE2 PkgConfig::UTF8PROC)

add_library(block_streamer_io INTERFACE)
add_library(block_streamer::io ALIAS block_streamer_io)
target_link_libraries(block_streamer_io INTERFACE block_streamer_core Boost::headers)

if(BLOCK_STREAMER_WITH_TORCH)
  include(BlockStreamerTorch)
  add_library(block_streamer INTERFACE)
  add_library(block_streamer::block_streamer ALIAS block_streamer)
  target_link_libraries(block_streamer INTERFACE block_streamer_io block_streamer_torch)
endif()
