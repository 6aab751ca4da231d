# What holds for this project's own builds only, never for a project that uses it.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# ccache refuses precompiled headers unless told that their macros and times may be trusted.
find_program(BLOCK_STREAMER_CCACHE ccache)
mark_as_advanced(BLOCK_STREAMER_CCACHE)
if(BLOCK_STREAMER_CCACHE AND (NOT CMAKE_CXX_COMPILER_LAUNCHER OR CMAKE_CXX_COMPILER_LAUNCHER STREQUAL "ccache"))
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${BLOCK_STREAMER_CCACHE})
endif()

# One LibTorch unit takes up to 2 GiB: no more at a time than fit in memory.
cmake_host_system_information(RESULT memory_mib QUERY AVAILABLE_PHYSICAL_MEMORY)
math(EXPR torch_jobs "${memory_mib} / 2560")
if(torch_jobs LESS 1)
  set(torch_jobs 1)
endif()
set_property(GLOBAL APPEND PROPERTY JOB_POOLS torch_jobs=${torch_jobs})
