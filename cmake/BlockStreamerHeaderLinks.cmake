# For cross builds: Boost, nlohmann_json and Catch2 as imported targets over the host's header-only packages. The host's include
# folder itself would bring its C library's headers along, so a folder with links to just these packages stands in for it.
# Sets BLOCK_STREAMER_HEADER_LINKS, that folder.
include_guard(GLOBAL)

set(BLOCK_STREAMER_HOST_INCLUDE /usr/include CACHE PATH "where the host keeps boost/, nlohmann/ and catch2/, for cross builds")
set(BLOCK_STREAMER_HEADER_LINKS ${CMAKE_BINARY_DIR}/header_links)

# block_streamer_link_headers(target file hint folder…): an imported target, if `file` is there.
function(block_streamer_link_headers target file hint)
  if(NOT EXISTS ${BLOCK_STREAMER_HOST_INCLUDE}/${file})
    message(FATAL_ERROR "block_streamer: ${file} is not in ${BLOCK_STREAMER_HOST_INCLUDE} (${hint})")
  endif()
  foreach(folder IN LISTS ARGN)
    file(MAKE_DIRECTORY ${BLOCK_STREAMER_HEADER_LINKS})
    file(CREATE_LINK ${BLOCK_STREAMER_HOST_INCLUDE}/${folder} ${BLOCK_STREAMER_HEADER_LINKS}/${folder} SYMBOLIC)
  endforeach()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} SYSTEM INTERFACE ${BLOCK_STREAMER_HEADER_LINKS})
endfunction()

block_streamer_link_headers(nlohmann_json::nlohmann_json nlohmann/json.hpp "Debian and Ubuntu: nlohmann-json3-dev" nlohmann)
block_streamer_link_headers(Boost::headers boost/asio.hpp "Debian and Ubuntu: libboost-dev or libboost1.81-dev" boost)
file(STRINGS ${BLOCK_STREAMER_HOST_INCLUDE}/boost/version.hpp boost_version REGEX "define BOOST_VERSION +[0-9]+")
string(REGEX MATCH "[0-9]+$" boost_version "${boost_version}")
if(boost_version LESS 108100)
  message(FATAL_ERROR "block_streamer: Boost ${boost_version} is too old, 1.81 is needed")
endif()
if(BLOCK_STREAMER_BUILD_TESTS)
  block_streamer_link_headers(Catch2::Catch2 catch2/catch.hpp "Catch2 version 2, which is one header; Debian 12: catch2" catch2)
endif()
