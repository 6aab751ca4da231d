// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/storage/storage_tier.hpp>

#include <memory>

namespace block_streamer::inline v1 {

/// A storage tier of any type, owned. The pipeline is compiled once per backend, not once per tier
/// and backend; the price is one virtual call per chunk.
class AnyStorage {
 public:
  template <class Tier>
  requires(!std::same_as<Tier, AnyStorage> && storage_tier<Tier>)
      AnyStorage(Tier tier)  // NOLINT(google-explicit-constructor): every tier converts
      : self_{std::make_unique<Model<Tier>>(std::move(tier))} {}

  [[nodiscard]] std::size_t block_count() const noexcept { return self_->block_count(); }
  [[nodiscard]] const BlockImage& image(BlockId block) const noexcept {
    return self_->image(block);
  }
  void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                  IoCompletion done) noexcept {
    self_->async_read(block, range, out, std::move(done));
  }
  /// @brief True if the held tier models addressable_tier, be it for some blocks only.
  [[nodiscard]] bool addressable() const noexcept { return self_->addressable(); }
  /// @brief True if the held tier has the block's image in memory.
  [[nodiscard]] bool in_memory(BlockId block) const noexcept { return self_->in_memory(block); }
  /// @brief The block's image in host memory; empty unless it is there.
  [[nodiscard]] std::span<const std::byte> bytes(BlockId block) const noexcept {
    return self_->bytes(block);
  }
  /// @brief What to page-lock; empty unless the held tier is addressable.
  [[nodiscard]] std::span<const std::span<std::byte>> regions() const noexcept {
    return self_->regions();
  }
  /// @brief As preparing_tier; nothing unless the held tier models it.
  void prepare(std::span<std::byte> memory) noexcept { self_->prepare(memory); }
  void forget(std::span<std::byte> memory) noexcept { self_->forget(memory); }
  /// @brief Where an image byte comes from, as far as the held tier can say.
  [[nodiscard]] std::string locate(BlockId block, std::uint64_t image_offset) const {
    return self_->locate(block, image_offset);
  }

 private:
  struct Base {
    Base() = default;
    Base(const Base&) = delete;
    Base& operator=(const Base&) = delete;
    virtual ~Base() = default;
    virtual std::size_t block_count() const noexcept = 0;
    virtual const BlockImage& image(BlockId) const noexcept = 0;
    virtual void async_read(BlockId, ByteRange, std::span<std::byte>, IoCompletion) noexcept = 0;
    virtual bool addressable() const noexcept = 0;
    virtual bool in_memory(BlockId) const noexcept = 0;
    virtual std::span<const std::byte> bytes(BlockId) const noexcept = 0;
    virtual std::span<const std::span<std::byte>> regions() const noexcept = 0;
    virtual void prepare(std::span<std::byte>) noexcept = 0;
    virtual void forget(std::span<std::byte>) noexcept = 0;
    virtual std::string locate(BlockId, std::uint64_t) const = 0;
  };

  template <class Tier>
  struct Model final : Base {
    explicit Model(Tier held) : tier{std::move(held)} {}
    std::size_t block_count() const noexcept override { return tier.block_count(); }
    const BlockImage& image(BlockId block) const noexcept override { return tier.image(block); }
    void async_read(BlockId block, ByteRange range, std::span<std::byte> out,
                    IoCompletion done) noexcept override {
      tier.async_read(block, range, out, std::move(done));
    }
    bool addressable() const noexcept override {
      if constexpr (requires { tier.addressable(); }) {
        return tier.addressable();  // a decorator of an erased tier
      } else {
        return addressable_tier<Tier>;
      }
    }
    bool in_memory([[maybe_unused]] BlockId block) const noexcept override {
      if constexpr (partly_addressable_tier<Tier>) {
        return tier.in_memory(block);
      } else {
        return addressable_tier<Tier>;
      }
    }
    std::span<const std::byte> bytes([[maybe_unused]] BlockId block) const noexcept override {
      if constexpr (addressable_tier<Tier>) {
        return tier.bytes(block);
      } else {
        return {};
      }
    }
    std::span<const std::span<std::byte>> regions() const noexcept override {
      if constexpr (addressable_tier<Tier>) {
        return tier.regions();
      } else {
        return {};
      }
    }
    void prepare([[maybe_unused]] std::span<std::byte> memory) noexcept override {
      if constexpr (preparing_tier<Tier>) tier.prepare(memory);
    }
    void forget([[maybe_unused]] std::span<std::byte> memory) noexcept override {
      if constexpr (preparing_tier<Tier>) tier.forget(memory);
    }
    std::string locate([[maybe_unused]] BlockId block, std::uint64_t image_offset) const override {
      if constexpr (locating_tier<Tier>) {
        return tier.locate(block, image_offset);
      } else {
        return "image offset " + std::to_string(image_offset);
      }
    }
    Tier tier;
  };

  std::unique_ptr<Base> self_;
};
static_assert(partly_addressable_tier<AnyStorage> && locating_tier<AnyStorage> &&
              preparing_tier<AnyStorage>);

}  // namespace block_streamer::inline v1
