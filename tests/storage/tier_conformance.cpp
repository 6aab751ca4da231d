// SPDX-License-Identifier: Apache-2.0
#include <storage/tier_conformance.hpp>

#include <block_streamer/storage/async_read.hpp>
#include <block_streamer/testing/storage_conformance.hpp>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/use_future.hpp>
#include <boost/system/system_error.hpp>

namespace block_streamer::testing_support {

namespace {

boost::asio::awaitable<int> await_images(AnyStorage& tier, const Images& images) {
  namespace asio = boost::asio;
  int good = 0;
  for (std::size_t b = 0; b < images.size(); ++b) {
    const Buffer buffer{images[b].size()};
    const ByteRange whole{0, images[b].size()};
    const std::size_t n =
        co_await async_read(tier, block_at(b), whole, buffer.span(), asio::use_awaitable);
    good += n == images[b].size() && buffer.holds(images[b]) ? 1 : 0;
  }
  const Buffer buffer{1};
  const auto [error, n] = co_await async_read(tier, block_at(images.size()), {0, 1}, buffer.span(),
                                              asio::as_tuple(asio::use_awaitable));
  good += error == boost::system::errc::invalid_argument && n == 0 ? 1 : 0;
  try {
    co_await async_read(tier, block_at(images.size()), {0, 1}, buffer.span(), asio::use_awaitable);
  } catch (const boost::system::system_error& thrown) {
    good += thrown.code() == boost::system::errc::invalid_argument ? 1 : 0;
  }
  co_return good;
}

void check_tokens(AnyStorage& tier, const Images& images) {
  namespace asio = boost::asio;
  const Bytes& last = images.back();
  const Buffer buffer{last.size()};
  const ByteRange whole{0, last.size()};
  const BlockId block = block_at(images.size() - 1);
  CHECK(async_read(tier, block, whole, buffer.span(), asio::use_future).get() == last.size());
  CHECK(buffer.holds(last));

  asio::io_context context;
  bool inside_initiation = true;
  int called = 0;
  asio::cancellation_signal ignored;
  async_read(tier, block, whole, buffer.span(),
             asio::bind_cancellation_slot(
                 ignored.slot(),
                 asio::bind_executor(context, [&](boost::system::error_code error, std::size_t n) {
                   called += !error && n == last.size() && !inside_initiation ? 1 : 100;
                 })));
  ignored.emit(asio::cancellation_type::all);
  inside_initiation = false;
  context.run();  // returns only when the read, as outstanding work, has ended
  CHECK(called == 1);

  context.restart();
  auto good = asio::co_spawn(context, await_images(tier, images), asio::use_future);
  context.run();
  CHECK(good.get() == static_cast<int>(images.size()) + 2);
}

}  // namespace

void check_tier(const std::function<AnyStorage()>& make, const Images& images) {
  const testing::Conformance found = testing::check_storage_tier(
      make(), images, [](const testing::Finding& f) { FAIL_CHECK(f.promise << ": " << f.found); },
      {.refuses_bad_ranges = true});
  CHECK(found.promises > 1000);
  AnyStorage tier = make();
  check_tokens(tier, images);
}

}  // namespace block_streamer::testing_support
