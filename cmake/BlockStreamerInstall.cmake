# Installs the headers, the targets and a package file: find_package(block_streamer 0.1 COMPONENTS core io block_streamer).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/block_streamer)

# LibTorch's level is an export of its own, so that the others can be used where LibTorch is not.
install(TARGETS block_streamer_core block_streamer_io EXPORT block_streamer FILE_SET HEADERS)
install(EXPORT block_streamer FILE block_streamerTargets.cmake NAMESPACE block_streamer:: DESTINATION ${package_dir})
if(TARGET block_streamer)
  install(TARGETS block_streamer EXPORT block_streamer_torch FILE_SET HEADERS)
  install(EXPORT block_streamer_torch FILE block_streamerTorchTargets.cmake NAMESPACE block_streamer:: DESTINATION ${package_dir})
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/block_streamerConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/block_streamerConfig.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/block_streamerConfigVersion.cmake
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/block_streamerConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/block_streamerConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/BlockStreamerTorch.cmake ${PROJECT_SOURCE_DIR}/cmake/BlockStreamerCuda.cmake
  ${PROJECT_SOURCE_DIR}/cmake/BlockStreamerUring.cmake ${PROJECT_SOURCE_DIR}/cmake/FindPCRE2.cmake ${PROJECT_SOURCE_DIR}/cmake/Findutf8proc.cmake
  DESTINATION ${package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
