# PCRE2::8BIT, through pkg-config where it is, else by file name. Debian's package has no CMake files.
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(PC_PCRE2 QUIET libpcre2-8)
endif()
find_path(PCRE2_INCLUDE_DIR pcre2.h HINTS ${PC_PCRE2_INCLUDE_DIRS})
find_library(PCRE2_8_LIBRARY pcre2-8 HINTS ${PC_PCRE2_LIBRARY_DIRS})
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PCRE2 REQUIRED_VARS PCRE2_8_LIBRARY PCRE2_INCLUDE_DIR
  VERSION_VAR PC_PCRE2_VERSION REASON_FAILURE_MESSAGE "(Debian and Ubuntu: libpcre2-dev)")
mark_as_advanced(PCRE2_INCLUDE_DIR PCRE2_8_LIBRARY)
if(PCRE2_FOUND AND NOT TARGET PCRE2::8BIT)
  add_library(PCRE2::8BIT UNKNOWN IMPORTED GLOBAL)
  set_target_properties(PCRE2::8BIT PROPERTIES IMPORTED_LOCATION ${PCRE2_8_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${PCRE2_INCLUDE_DIR})
endif()
