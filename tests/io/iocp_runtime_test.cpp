// SPDX-License-Identifier: Apache-2.0
#include <block_streamer/io/iocp_runtime.hpp>

#include <io/scripted_iocp.hpp>
#include <support/catch.hpp>
#include <support/safetensors_files.hpp>

#include <atomic>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace bs = block_streamer;
using bs::testing_support::IocpScript;
using bs::testing_support::ScriptedRuntime;

namespace {

/// How reads ended, in order.
class Ends {
 public:
  struct End {
    int number;
    std::error_code error;
    std::size_t byte_count;
  };
  bs::IoCompletion completion(int number) {
    return [this, number](std::error_code error, std::size_t byte_count) {
      const std::scoped_lock lock{mutex_};
      ends_.push_back({number, error, byte_count});
      changed_.notify_all();
    };
  }
  std::vector<End> wait(std::size_t count) {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return ends_.size() >= count; });
    return ends_;
  }
  std::size_t count() {
    const std::scoped_lock lock{mutex_};
    return ends_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<End> ends_;
};

/// A pipe whose reading end is overlapped: reads of it are pending until somebody writes.
class Pipe {
 public:
  Pipe() {
    const std::string name = "\\\\.\\pipe\\block_streamer_io_" +
                             std::to_string(::GetCurrentProcessId()) + "_" +
                             std::to_string(reinterpret_cast<std::uintptr_t>(this));
    reader_ = bs::detail::WindowsHandle{
        ::CreateNamedPipeA(name.c_str(), PIPE_ACCESS_INBOUND | FILE_FLAG_OVERLAPPED,
                           PIPE_TYPE_BYTE | PIPE_WAIT, 1, 4096, 4096, 0, nullptr)};
    REQUIRE(reader_);
    writer_ = bs::detail::WindowsHandle{
        ::CreateFileA(name.c_str(), GENERIC_WRITE, 0, nullptr, OPEN_EXISTING, 0, nullptr)};
    REQUIRE(writer_);
  }
  [[nodiscard]] HANDLE reader() const { return reader_.get(); }
  void write(std::string_view text) const {
    DWORD put = 0;
    REQUIRE(::WriteFile(writer_.get(), text.data(), static_cast<DWORD>(text.size()), &put,
                        nullptr) != 0);
  }

 private:
  bs::detail::WindowsHandle reader_;
  bs::detail::WindowsHandle writer_;
};

struct OpenedFile {
  explicit OpenedFile(const std::filesystem::path& path) {
    std::error_code error;
    handle = bs::detail::open_overlapped(path, 0, error);
    REQUIRE_FALSE(error);
  }
  bs::detail::WindowsHandle handle;
};

std::span<std::byte> bytes_of(std::string& text) {
  return std::as_writable_bytes(std::span{text});
}

}  // namespace

TEST_CASE("a read completes once with all its bytes, zeros beyond the file's end") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("iocp", 10'000);
  support::write_text(folder / "f", data);
  const OpenedFile file{folder / "f"};
  std::string out(4096, '\xEE');
  Ends ends;
  bs::IocpRuntime runtime;
  REQUIRE_FALSE(runtime.attach(file.handle.get()));
  runtime.async_read({file.handle.get(), 8192, bytes_of(out), 10'000 - 8192, 1},
                     ends.completion(0));
  const auto end = ends.wait(1).front();
  CHECK_FALSE(end.error);
  CHECK(end.byte_count == 4096);
  CHECK(out == data.substr(8192) + std::string(4096 - (10'000 - 8192), '\0'));
}

TEST_CASE("b54 the destructor waits for reads that are still pending in the system") {
  const Pipe pipe;
  std::string out(3, '\0');
  Ends ends;
  IocpScript script;
  std::size_t gone = 0;
  auto runtime = std::make_unique<ScriptedRuntime>(bs::IocpOptions{}, script);
  REQUIRE_FALSE(runtime->attach(pipe.reader()));
  runtime->async_read({pipe.reader(), 0, bytes_of(out), 3, 1}, ends.completion(0));
  script.wait([&] { return script.waits_begun == 1; });
  auto destroyed = std::async(std::launch::async, [&] {
    runtime.reset();
    script.count(gone);
  });
  // The destructor has woken the port's thread, which waits again: nothing came.
  script.wait([&] { return script.waits_begun == 2 || gone != 0; });
  CHECK(gone == 0);
  CHECK(ends.count() == 0);
  pipe.write("abc");
  destroyed.get();
  REQUIRE(ends.count() == 1);
  CHECK(out == "abc");
}

TEST_CASE("a read that is cancelled while it is handed to the system does not stay there") {
  const Pipe pipe;
  std::string out(3, '\0');
  Ends ends;
  IocpScript script;
  script.hold = true;
  ScriptedRuntime runtime{{}, {script}};
  REQUIRE_FALSE(runtime.attach(pipe.reader()));
  runtime.async_read({pipe.reader(), 0, bytes_of(out), 3, 1}, ends.completion(0));
  script.wait([&] { return script.reads_begun == 1; });
  runtime.cancel(pipe.reader());
  script.release();
  CHECK(ends.wait(1).front().error == std::errc::operation_canceled);
}

TEST_CASE("cancelled reads complete as cancelled, pending and waiting ones, and others go on") {
  const Pipe stopped;
  const Pipe untouched;
  std::string out(4, '\xEE');
  std::vector<std::string> more(3, std::string(4, '\xEE'));
  std::string other(3, '\0');
  Ends ends;
  bs::IocpRuntime runtime{{.queue_depth = 2}};
  REQUIRE_FALSE(runtime.attach(stopped.reader()));
  REQUIRE_FALSE(runtime.attach(untouched.reader()));
  runtime.async_read({untouched.reader(), 0, bytes_of(other), 3, 1}, ends.completion(9));
  for (int i = 0; i < 3; ++i) {
    runtime.async_read({stopped.reader(), 0, bytes_of(more[static_cast<std::size_t>(i)]), 4, 1},
                       ends.completion(i));
  }
  runtime.cancel(stopped.reader());
  for (const auto& end : ends.wait(3)) {
    CHECK(end.number != 9);
    CHECK(end.error == std::errc::operation_canceled);
    CHECK(end.byte_count == 0);
  }
  // Nobody holds the memory any more: a new read gets what is written now.
  runtime.async_read({stopped.reader(), 0, bytes_of(out), 4, 1}, ends.completion(4));
  stopped.write("late");
  CHECK_FALSE(ends.wait(4)[3].error);
  CHECK(out == "late");
  for (const std::string& text : more) CHECK(text == std::string(4, '\xEE'));
  untouched.write("abc");
  CHECK(ends.wait(5)[4].number == 9);
  CHECK(other == "abc");
}

TEST_CASE("cancelling again and again while reads are accepted never leaves one behind") {
  const Pipe pipe;
  Ends ends;
  std::string out(4, '\0');
  bs::IocpRuntime runtime{{.queue_depth = 1}};
  REQUIRE_FALSE(runtime.attach(pipe.reader()));
  for (int i = 0; i < 200; ++i) {
    runtime.async_read({pipe.reader(), 0, bytes_of(out), 4, 1}, ends.completion(i));
    runtime.cancel(pipe.reader());
    REQUIRE(ends.wait(static_cast<std::size_t>(i) + 1).back().error ==
            std::errc::operation_canceled);
  }
}

TEST_CASE("a group outlasts the completions of its reads") {
  const support::TempFolder folder;
  support::write_text(folder / "f", std::string(100, 'x'));
  const OpenedFile file{folder / "f"};
  bs::IocpRuntime runtime;
  REQUIRE_FALSE(runtime.attach(file.handle.get()));
  for (int round = 0; round < 50; ++round) {
    std::vector<std::string> outs(20, std::string(5, '\0'));
    std::atomic<int> ended = 0;
    {
      bs::ReadGroup group;
      for (std::string& out : outs) {
        runtime.async_read(
            {file.handle.get(), 0, bytes_of(out), 5, 1},
            [&ended](std::error_code, std::size_t) { ++ended; }, &group);
      }
    }
    REQUIRE(ended == 20);
  }
}

TEST_CASE("never more requests are in the system than the depth, and all are served") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("depth", 50'000);
  support::write_text(folder / "f", data);
  const OpenedFile file{folder / "f"};
  IocpScript script;
  std::vector<std::string> outs(100, std::string(300, '\0'));
  Ends ends;
  {
    ScriptedRuntime runtime{{.queue_depth = 3}, {script}};
    REQUIRE_FALSE(runtime.attach(file.handle.get()));
    for (int i = 0; i < 100; ++i) {
      runtime.async_read({file.handle.get(), static_cast<std::uint64_t>(i) * 300,
                          bytes_of(outs[static_cast<std::size_t>(i)]), 300, 1},
                         ends.completion(i));
    }
  }
  CHECK(ends.count() == 100);
  CHECK(script.most_in_flight <= 3);
  for (std::size_t i = 0; i < 100; ++i) CHECK(outs[i] == data.substr(i * 300, 300));
}

TEST_CASE("a short answer at any place is resumed at the last whole sector") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("short", 10 * 512 + 77);
  support::write_text(folder / "f", data);
  for (const std::size_t cut : {1U, 511U, 512U, 513U, 1500U, 5000U, 5197U}) {
    const OpenedFile file{folder / "f"};
    IocpScript script;
    script.shorten = {{0, cut}};
    std::string out(11 * 512, '\xEE');
    Ends ends;
    ScriptedRuntime runtime{{}, {script}};
    REQUIRE_FALSE(runtime.attach(file.handle.get()));
    runtime.async_read({file.handle.get(), 0, bytes_of(out), data.size(), 512}, ends.completion(0));
    REQUIRE_FALSE(ends.wait(1).front().error);
    CHECK(out == data + std::string(11 * 512 - data.size(), '\0'));
    for (const std::uint64_t offset : script.offsets) CHECK(offset % 512 == 0);
    CHECK(script.offsets.size() >= (cut < 5197U ? 2U : 1U));
  }
}

TEST_CASE("a device that goes on giving less than a sector is an error in the end") {
  const support::TempFolder folder;
  support::write_text(folder / "f", std::string(1024, 'x'));
  const OpenedFile file{folder / "f"};
  IocpScript script;
  script.shorten_all = 100;
  std::string out(1024, '\0');
  Ends ends;
  ScriptedRuntime runtime{{}, {script}};
  REQUIRE_FALSE(runtime.attach(file.handle.get()));
  runtime.async_read({file.handle.get(), 0, bytes_of(out), 1024, 512}, ends.completion(0));
  CHECK(ends.wait(1).front().error == std::errc::io_error);
  CHECK(script.offsets.size() > 2);
}

TEST_CASE("a refusal for want of room is tried again after another read has ended") {
  const support::TempFolder folder;
  const std::string data = support::pattern_bytes("room", 4000);
  support::write_text(folder / "f", data);
  for (const DWORD code : {DWORD{ERROR_INVALID_USER_BUFFER}, DWORD{ERROR_NOT_ENOUGH_MEMORY},
                           DWORD{ERROR_NO_SYSTEM_RESOURCES}}) {
    const OpenedFile file{folder / "f"};
    IocpScript script;
    script.hold = true;
    script.refuse = {{1, code}, {2, code}};
    std::vector<std::string> outs(4, std::string(1000, '\0'));
    Ends ends;
    {
      ScriptedRuntime runtime{{}, {script}};
      REQUIRE_FALSE(runtime.attach(file.handle.get()));
      for (int i = 0; i < 4; ++i) {
        runtime.async_read({file.handle.get(), static_cast<std::uint64_t>(i) * 1000,
                            bytes_of(outs[static_cast<std::size_t>(i)]), 1000, 1},
                           ends.completion(i));
      }
      script.release();
    }
    const auto all = ends.wait(4);
    int failed = 0;
    for (const auto& end : all) {
      if (end.error) {
        ++failed;  // only where nothing else was in flight that could have made room
        CHECK(end.error.value() == static_cast<int>(code));
      } else {
        const auto i = static_cast<std::size_t>(end.number);
        CHECK(outs[i] == data.substr(i * 1000, 1000));
      }
    }
    CHECK(failed <= 1);
  }
}

TEST_CASE("an error of the system is reported as it is, and later reads are served") {
  const support::TempFolder folder;
  support::write_text(folder / "f", "abc");
  const OpenedFile file{folder / "f"};
  IocpScript script;
  script.refuse = {{0, ERROR_CRC}};
  std::string out(3, '\0');
  Ends ends;
  ScriptedRuntime runtime{{}, {script}};
  REQUIRE_FALSE(runtime.attach(file.handle.get()));
  runtime.async_read({file.handle.get(), 0, bytes_of(out), 3, 1}, ends.completion(0));
  CHECK(ends.wait(1).front().error == std::error_code(ERROR_CRC, std::system_category()));
  runtime.async_read({file.handle.get(), 0, bytes_of(out), 3, 1}, ends.completion(1));
  CHECK_FALSE(ends.wait(2)[1].error);
  CHECK(out == "abc");
}

TEST_CASE("options out of range are refused by name") {
  CHECK_THROWS_WITH(bs::IocpRuntime({.queue_depth = 0}), ContainsSubstring("queue_depth"));
  CHECK_THROWS_WITH(bs::IocpRuntime({.request_byte_count = 4096}),
                    ContainsSubstring("request_byte_count"));
}
