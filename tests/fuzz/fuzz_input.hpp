// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: input bytes as a file, and what counts as a finding.
#pragma once

#include <block_streamer/core/error.hpp>

#include <support/fresh_folder.hpp>

#if !defined(_WIN32)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace fuzz {

/// Ends the process, so that the fuzzer keeps the input.
[[noreturn]] inline void finding(const std::string& what) {
  std::fprintf(stderr, "finding: %s\n", what.c_str());
  std::abort();
}

inline void require(bool condition, const char* what) {
  if (!condition) finding(what);
}

/// Calls `use`; a file may be refused with the library's own errors and in no other way.
template <class Use>
void refuses_or_accepts(Use&& use) {
  try {
    use();
  } catch (const block_streamer::Error&) {
  } catch (const std::exception& error) {
    finding(std::string{"a foreign exception: "} + error.what());
  }
}

[[nodiscard]] inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// A folder of this process, in memory where the system has such a place.
class ScratchFolder {
 public:
  ScratchFolder() : path_{support::fresh_folder("bs-fuzz-", place())} {}
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  void write(const char* name, std::string_view text) const {
    std::ofstream out{path_ / name, std::ios::binary | std::ios::trunc};
    out.write(text.data(), static_cast<std::streamsize>(text.size()));
    require(static_cast<bool>(out), "the scratch folder cannot be written");
  }
  void remove(const char* name) const {
    std::error_code ignored;
    std::filesystem::remove(path_ / name, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  [[nodiscard]] static std::filesystem::path place() {
    std::error_code ignored;
    const std::filesystem::path in_memory = "/dev/shm";
    return std::filesystem::is_directory(in_memory, ignored)
               ? in_memory
               : std::filesystem::temp_directory_path();
  }
  std::filesystem::path path_;
};

#if defined(_WIN32)
/// A file whose content is replaced for each input.
class MemoryFile {
 public:
  void fill(std::string_view bytes) const { folder_.write("file", bytes); }
  [[nodiscard]] std::filesystem::path path() const { return folder_.path() / "file"; }

 private:
  ScratchFolder folder_;
};
#else
/// A file in memory whose content is replaced for each input.
class MemoryFile {
 public:
  MemoryFile() : descriptor_{::memfd_create("fuzz", MFD_CLOEXEC)} {
    if (descriptor_ < 0) finding("memfd_create failed");
    path_ = "/proc/self/fd/" + std::to_string(descriptor_);
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile() { ::close(descriptor_); }

  void fill(std::string_view bytes) {
    const auto size = static_cast<ssize_t>(bytes.size());
    if (::ftruncate(descriptor_, size) != 0 ||
        ::pwrite(descriptor_, bytes.data(), bytes.size(), 0) != size) {
      finding("the file in memory cannot be written");
    }
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  int descriptor_;
  std::filesystem::path path_;
};
#endif

}  // namespace fuzz
