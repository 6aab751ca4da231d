// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/core/error.hpp>
#include <block_streamer/os/windows_api.hpp>

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief A folder that one process works in: whoever locks it next is refused, until this object
/// or its process ends, however it ends. Nothing is written for it. It binds only those who ask, on
/// this machine.
class FolderLock {
 public:
  FolderLock() noexcept = default;

  /// @brief Makes the folder, if there is none, and locks it.
  /// @throws StorageError if it is no folder or cannot be made or opened; Error if it is in use.
  [[nodiscard]] static FolderLock of(const std::filesystem::path& folder) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) throw StorageError{folder.string(), "no folder can be made there", error};
    FolderLock lock;
    lock.name_ = detail::WindowsHandle{::CreateMutexW(nullptr, FALSE, name_of(folder).c_str())};
    const DWORD code = ::GetLastError();
    if (lock.name_ && code != ERROR_ALREADY_EXISTS) return lock;
    if (code == ERROR_ALREADY_EXISTS || code == ERROR_ACCESS_DENIED) {  // denied: of another user
      throw Error{folder.string() + " is in use by another process; wait for it or name another"};
    }
    throw StorageError{folder.string(), "cannot lock the folder", detail::windows_error(code)};
  }

  void release() noexcept { name_.close(); }

 private:
  /// The folder's identity. A handle that denies sharing would keep its own process from listing
  /// the folder and from moving files and the folder itself.
  [[nodiscard]] static std::wstring name_of(const std::filesystem::path& folder) {
    const detail::WindowsHandle opened{
        ::CreateFileW(folder.c_str(), FILE_READ_ATTRIBUTES,
                      FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr,
                      OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, nullptr)};
    BY_HANDLE_FILE_INFORMATION about{};
    if (!opened || ::GetFileInformationByHandle(opened.get(), &about) == 0) {
      throw StorageError{folder.string(), "cannot open the folder", detail::last_system_error()};
    }
    return L"Global\\block_streamer folder " + std::to_wstring(about.dwVolumeSerialNumber) + L" " +
           std::to_wstring(about.nFileIndexHigh) + L" " + std::to_wstring(about.nFileIndexLow);
  }

  detail::WindowsHandle name_;  ///< its existence is the lock
};

}  // namespace block_streamer::inline v1
