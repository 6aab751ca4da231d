// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace block_streamer::inline v1 {

/// The world failed, or refused: I/O, device, memory, a bad file, an unsupported model. The text of
/// every subclass names what is known of file, block, tensor, offset and cause.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller broke a documented precondition. A bug in the calling program, not an event of the
/// world.
class ContractViolation : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// A file does not follow its format. Nothing of it was used.
class FormatError : public Error {
 public:
  FormatError(std::string path, const std::string& what, std::optional<std::uint64_t> offset = {})
      : Error{path + (offset ? " (at byte " + std::to_string(*offset) + ")" : "") + ": " + what},
        path_{std::move(path)},
        offset_{offset} {}
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Byte offset in the file where the fault was seen, if one place can be named.
  [[nodiscard]] std::optional<std::uint64_t> offset() const noexcept { return offset_; }

 private:
  std::string path_;
  std::optional<std::uint64_t> offset_;
};

/// Reading or writing failed. `where` is a path, or a tier's description of a place.
class StorageError : public Error {
 public:
  StorageError(const std::string& where, const std::string& what, std::error_code code = {})
      : Error{where + ": " + what + (code ? ": " + code.message() : "")}, code_{code} {}
  [[nodiscard]] std::error_code code() const noexcept { return code_; }

 private:
  std::error_code code_;
};

/// A device call failed. `sticky()`: the device context is lost and no later call can succeed.
class DeviceError : public Error {
 public:
  DeviceError(const std::string& what, int native_code, bool sticky = false)
      : Error{what}, native_code_{native_code}, sticky_{sticky} {}
  [[nodiscard]] int native_code() const noexcept { return native_code_; }
  [[nodiscard]] bool sticky() const noexcept { return sticky_; }

 private:
  int native_code_;
  bool sticky_;
};

/// A model, field, dtype or option that is not implemented, refused by name.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

/// Stored tensors and a block's expectations differ: missing, unexpected, wrong shape or dtype.
class BindingError : public Error {
 public:
  using Error::Error;
};

}  // namespace block_streamer::inline v1
