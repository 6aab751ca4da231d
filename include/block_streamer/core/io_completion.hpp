// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cassert>
#include <concepts>
#include <cstddef>
#include <new>
#include <system_error>
#include <type_traits>
#include <utility>

namespace block_streamer::inline v1 {

/// @brief What an asynchronous operation calls when it has finished: void(std::error_code,
/// std::size_t bytes). Called exactly once, from any thread, also from inside the initiating
/// function; the function must not throw. Move-only. Destroying one uncalled is a bug that debug
/// builds report.
/// **Cost.** No allocation for functions of up to 64 bytes.
class IoCompletion {
 public:
  IoCompletion() noexcept = default;

  template <class Function>
  requires(!std::same_as<std::remove_cvref_t<Function>, IoCompletion> &&
           std::invocable<Function&, std::error_code, std::size_t>)
      IoCompletion(Function function) {  // NOLINT(google-explicit-constructor): a function converts
    if constexpr (fits<Function>) {
      ::new (static_cast<void*>(storage_)) Function(std::move(function));
      table_ = &inline_table<Function>;
    } else {
      ::new (static_cast<void*>(storage_)) Function*(new Function(std::move(function)));
      table_ = &heap_table<Function>;
    }
  }

  IoCompletion(IoCompletion&& other) noexcept { take(other); }
  IoCompletion& operator=(IoCompletion&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  IoCompletion(const IoCompletion&) = delete;
  IoCompletion& operator=(const IoCompletion&) = delete;
  ~IoCompletion() { reset(); }

  /// @brief Reports the end of the operation. @pre not called before; not empty.
  void operator()(std::error_code error, std::size_t byte_count) noexcept {
    assert(table_ != nullptr);
    // Moved out first: the function may destroy the object that holds this completion.
    IoCompletion once = std::move(*this);
    const Table* table = std::exchange(once.table_, nullptr);
    table->call(once.storage_, error, byte_count);
    table->destroy(once.storage_);
  }

  explicit operator bool() const noexcept { return table_ != nullptr; }

 private:
  struct Table {
    void (*call)(void*, std::error_code, std::size_t);
    void (*move)(void* to, void* from) noexcept;
    void (*destroy)(void*) noexcept;
  };
  static constexpr std::size_t inline_size = 64;

  template <class Function>
  static constexpr bool fits = sizeof(Function) <= inline_size &&
                               alignof(Function) <= alignof(std::max_align_t) &&
                               std::is_nothrow_move_constructible_v<Function>;

  template <class Function>
  static constexpr Table inline_table{
      [](void* self, std::error_code error, std::size_t n) {
        (*std::launder(static_cast<Function*>(self)))(error, n);
      },
      [](void* to, void* from) noexcept {
        auto* source = std::launder(static_cast<Function*>(from));
        ::new (to) Function(std::move(*source));
        source->~Function();
      },
      [](void* self) noexcept { std::launder(static_cast<Function*>(self))->~Function(); }};

  template <class Function>
  static constexpr Table heap_table{
      [](void* self, std::error_code error, std::size_t n) {
        (**std::launder(static_cast<Function**>(self)))(error, n);
      },
      [](void* to, void* from) noexcept {
        ::new (to) Function*(*std::launder(static_cast<Function**>(from)));
      },
      [](void* self) noexcept { delete *std::launder(static_cast<Function**>(self)); }};

  void take(IoCompletion& other) noexcept {
    table_ = std::exchange(other.table_, nullptr);
    if (table_ != nullptr) table_->move(storage_, other.storage_);
  }
  void reset() noexcept {
    assert(table_ == nullptr && "an IoCompletion was dropped without being called");
    if (table_ != nullptr) std::exchange(table_, nullptr)->destroy(storage_);
  }

  alignas(std::max_align_t) std::byte storage_[inline_size];
  const Table* table_ = nullptr;
};

}  // namespace block_streamer::inline v1
