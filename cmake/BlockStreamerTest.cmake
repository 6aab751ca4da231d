# block_streamer_add_test(NAME core TARGET block_streamer::core SOURCES a_test.cpp … [LABELS l …] [ARGS a …] [BUSY])
# One executable a folder. Torch-free tests are listed case by case; a LibTorch test is one ctest entry, because each process
# start loads LibTorch. So is a test that runs under wine (label wine), which starts slowly. TARGET may be a list: block_streamer::io block_streamer::cuda.
# BUSY tests try so many cases that they are optimised under sanitizers too.
# Several files of a test are compiled as one unit: most of a unit's time goes into templates that all of them instantiate.
option(BLOCK_STREAMER_UNITY_TESTS "compile up to six files of a test as one unit" ON)
option(BLOCK_STREAMER_WARNINGS_AS_ERRORS "refuse warnings in the tests" OFF)
if(NOT TARGET Catch2::Catch2)
  find_package(Catch2 QUIET)
  include(Catch OPTIONAL)
endif()

add_library(block_streamer_test_support INTERFACE)
target_include_directories(block_streamer_test_support INTERFACE ${PROJECT_SOURCE_DIR}/tests)
target_compile_options(block_streamer_test_support INTERFACE -Wall -Wextra -Wpedantic -Wshadow
  # g++ 12 sees overlaps in std::string's operator+ that are not there (GCC bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
  $<$<BOOL:${BLOCK_STREAMER_WARNINGS_AS_ERRORS}>:-Werror>
  # g++ spends a fifth of its time collecting garbage within memory that a unit needs anyway.
  $<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-expand=300> $<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=1000000>)
if(BLOCK_STREAMER_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # Boost.Asio's fences: g++ only says that the sanitizer does not model them.
  target_compile_options(block_streamer_test_support INTERFACE -Wno-tsan)
endif()
if(BLOCK_STREAMER_SANITIZE)
  target_compile_options(block_streamer_test_support INTERFACE -fsanitize=${BLOCK_STREAMER_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(block_streamer_test_support INTERFACE -fsanitize=${BLOCK_STREAMER_SANITIZE})
endif()
if(BLOCK_STREAMER_SANITIZE MATCHES undefined AND CMAKE_CXX_COMPILER_ID STREQUAL Clang AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 17)
  # Its prologue cannot be assembled in a section of its own.
  target_compile_options(block_streamer_test_support INTERFACE -fno-sanitize=function)
endif()
if(TARGET Catch2::Catch2WithMain)
  target_link_libraries(block_streamer_test_support INTERFACE Catch2::Catch2)
  add_library(block_streamer_test_main ALIAS Catch2::Catch2WithMain)
else()
  add_library(block_streamer_test_main STATIC ${PROJECT_SOURCE_DIR}/tests/support/main.cpp)
  target_link_libraries(block_streamer_test_main PUBLIC Catch2::Catch2)
  target_compile_features(block_streamer_test_main PUBLIC cxx_std_20)
endif()

# Torch-free tests are optimised far enough to find what optimising breaks; more takes a third longer to compile.
set(fast $<$<CONFIG:Release>:-O1>)
if(BLOCK_STREAMER_PRECOMPILE)
  set(common <support/catch.hpp> <nlohmann/json.hpp>
    <atomic> <filesystem> <functional> <map> <memory> <mutex> <optional> <random> <span> <string> <thread> <utility> <vector>)
  _block_streamer_add_pch(block_streamer_core_pch ${common})
  target_link_libraries(block_streamer_core_pch PRIVATE block_streamer::core block_streamer_test_support)
  _block_streamer_add_pch(block_streamer_io_pch ${common} <boost/asio/append.hpp>
    <boost/asio/executor_work_guard.hpp> <boost/asio/io_context.hpp> <boost/asio/post.hpp>)
  target_link_libraries(block_streamer_io_pch PRIVATE block_streamer::io block_streamer_test_support)
  target_compile_options(block_streamer_core_pch PRIVATE ${fast})
  target_compile_options(block_streamer_io_pch PRIVATE ${fast})
endif()

# LibTorch tests spend their time in LibTorch and most of their compile time in the optimiser. clang's are optimised.
if(BLOCK_STREAMER_WITH_TORCH)
  set(torch_fast $<$<AND:$<CXX_COMPILER_ID:GNU>,$<CONFIG:Release>>:-O0>)
  if(BLOCK_STREAMER_PRECOMPILE)
    _block_streamer_add_torch_pch(block_streamer_torch_test_pch)
    target_compile_options(block_streamer_torch_test_pch PRIVATE ${torch_fast})
  endif()
endif()

# The precompiled header of the highest of its levels.
function(_block_streamer_compile_fast target)
  target_compile_options(${target} PRIVATE ${fast})
  if(NOT BLOCK_STREAMER_PRECOMPILE)
    return()
  endif()
  set(pch block_streamer_core_pch)
  if("block_streamer::io" IN_LIST ARGN)
    set(pch block_streamer_io_pch)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${pch})
  _block_streamer_pch_options(${target})
endfunction()

function(block_streamer_add_test)
  cmake_parse_arguments(T "BUSY" "NAME" "TARGET;SOURCES;LABELS;ARGS" ${ARGN})
  add_executable(test_${T_NAME} ${T_SOURCES})
  set_target_properties(test_${T_NAME} PROPERTIES UNITY_BUILD ${BLOCK_STREAMER_UNITY_TESTS} UNITY_BUILD_BATCH_SIZE 6)
  if(MINGW AND CMAKE_CROSSCOMPILING)
    list(APPEND T_LABELS wine)
  endif()
  if(T_LABELS)
    set(labels LABELS "${T_LABELS}")
  endif()
  if(cuda IN_LIST T_LABELS)  # one at a time: some ask how much device memory is free
    list(APPEND labels RESOURCE_LOCK cuda)
  endif()
  target_link_libraries(test_${T_NAME} PRIVATE ${T_TARGET} block_streamer_test_support block_streamer_test_main)
  if("block_streamer::block_streamer" IN_LIST T_TARGET OR "block_streamer::torch_cuda" IN_LIST T_TARGET)
    block_streamer_use_torch(test_${T_NAME} block_streamer_torch_test_pch)
    target_compile_options(test_${T_NAME} PRIVATE ${torch_fast})
    set(needs_torch TRUE)
  elseif(T_BUSY AND BLOCK_STREAMER_SANITIZE)
    target_compile_options(test_${T_NAME} PRIVATE -O1)  # which no precompiled header has
  elseif(NOT "block_streamer::cuda" IN_LIST T_TARGET)
    _block_streamer_compile_fast(test_${T_NAME} ${T_TARGET})
  endif()
  if(needs_torch OR NOT COMMAND catch_discover_tests)
    add_test(NAME ${T_NAME} COMMAND test_${T_NAME} ${T_ARGS})
    # Tests run side by side: two that use every core wait for each other's threads at every operation.
    set_tests_properties(${T_NAME} PROPERTIES TIMEOUT 600 ENVIRONMENT OMP_NUM_THREADS=1 ${labels})
  else()
    catch_discover_tests(test_${T_NAME} TEST_PREFIX "${T_NAME}: " EXTRA_ARGS ${T_ARGS} PROPERTIES TIMEOUT 300 ${labels})
  endif()
endfunction()
