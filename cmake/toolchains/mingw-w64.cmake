# Compiles for 64-bit Windows on Linux with mingw-w64. The variant with POSIX threads: the other one has no std::thread.
#   cmake --preset mingw
# Programs run under wine: tests/wine.sh is the emulator that ctest starts them with.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)

find_program(CMAKE_CXX_COMPILER NAMES x86_64-w64-mingw32-g++-posix x86_64-w64-mingw32-g++)
find_program(CMAKE_RC_COMPILER NAMES x86_64-w64-mingw32-windres)
if(NOT CMAKE_CXX_COMPILER)
  message(FATAL_ERROR "mingw-w64 is not found (Debian and Ubuntu: g++-mingw-w64-x86-64-posix); tests/wine.sh setup installs it")
endif()

# The host's headers and libraries must never be found: its C library is not Windows'.
set(CMAKE_FIND_ROOT_PATH /usr/x86_64-w64-mingw32)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# Windows 10: what PrefetchVirtualMemory and Asio's completion ports are declared for.
set(CMAKE_CXX_FLAGS_INIT "-D_WIN32_WINNT=0x0A00")
# Compiler and thread libraries inside the program: they are not on Windows' search path.
set(CMAKE_EXE_LINKER_FLAGS_INIT "-static")
set(CMAKE_CROSSCOMPILING_EMULATOR "${CMAKE_CURRENT_LIST_DIR}/../../tests/wine.sh;run")
