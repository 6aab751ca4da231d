// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <block_streamer/io/asio_threads.hpp>
#include <block_streamer/storage/storage_tier.hpp>

#include <boost/asio/append.hpp>
#include <boost/asio/associated_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/execution/outstanding_work.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/prefer.hpp>
#include <boost/system/error_code.hpp>

#include <utility>

namespace block_streamer::inline v1 {

/// @brief Reads from any tier with any Asio completion token: a callback, use_future,
/// use_awaitable, as_tuple, deferred. The signature is void(boost::system::error_code,
/// std::size_t): Asio turns only Boost's code into an exception.
/// **Threads.** The handler runs on its associated executor, never inside this call; that executor
/// counts the read as outstanding work.
/// **Cancellation.** Not supported: a slot connected to the handler is ignored, the read completes.
/// **Lifetime.** `tier` and `out` stay valid until the handler was called; a deferred operation
/// starts when it is invoked.
template <storage_tier Tier, class Token>
auto async_read(Tier& tier, BlockId block, ByteRange range, std::span<std::byte> out,
                Token&& token) {
  return boost::asio::async_initiate<Token, void(boost::system::error_code, std::size_t)>(
      [&tier, block, range, out](auto handler) {
        auto work = boost::asio::prefer(boost::asio::get_associated_executor(handler),
                                        boost::asio::execution::outstanding_work.tracked);
        tier.async_read(block, range, out,
                        [handler = std::move(handler), work = std::move(work)](
                            std::error_code error, std::size_t byte_count) mutable {
                          boost::asio::post(
                              work,
                              boost::asio::append(std::move(handler),
                                                  boost::system::error_code{error}, byte_count));
                        });
      },
      token);
}

}  // namespace block_streamer::inline v1
