// Tests where the library's messages go.

#include "tessera/mesh/core/log.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/mesh/core/logger.h"

namespace tessera {
namespace {

// Returns what goes to the file descriptor `fd` of this process while `act` runs.
template <typename Act>
std::string written_to(int fd, const Act& act) {
  std::FILE* const file = std::tmpfile();
  REQUIRE(file != nullptr);
  const int before = ::dup(fd);
  ::dup2(::fileno(file), fd);
  act();
  logger().flush();
  ::dup2(before, fd);
  ::close(before);
  std::rewind(file);
  std::array<char, 4096> bytes{};
  const std::string text(bytes.data(), std::fread(bytes.data(), 1, bytes.size(), file));
  static_cast<void>(std::fclose(file));
  return text;
}

struct ToStandardError {
  ~ToStandardError() { set_log_sink({}); }
};

TEST_CASE("log: messages go to the standard error stream, those below information nowhere") {
  std::string other;
  const std::string text = written_to(STDERR_FILENO, [&] {
    other = written_to(STDOUT_FILENO, [] {
      logger().debug("a detail");
      logger().warn("a warning of {}", 3);
    });
  });
  CHECK(text.find("[tessera] [warning] a warning of 3\n") != std::string::npos);
  CHECK(text.find("a detail") == std::string::npos);
  CHECK(other.empty());
}

TEST_CASE("log: a sink gets the text and how grave it is, from the level that was asked for") {
  const ToStandardError at_end;
  const auto messages = [](LogLevel least) {
    std::string seen;
    set_log_sink(
        [&](LogLevel level, const std::string& text) { seen += std::to_string(static_cast<int>(level)) + text; },
        least);
    logger().debug("d");
    logger().info("i");
    logger().warn("w{}", 1);
    logger().error("e");
    set_log_sink({});
    return seen;
  };
  CHECK(written_to(STDERR_FILENO, [&] {
          CHECK(messages(LogLevel::kDebug) == "0d1i2w13e");
          CHECK(messages(LogLevel::kInfo) == "1i2w13e");
          CHECK(messages(LogLevel::kWarning) == "2w13e");
          CHECK(messages(LogLevel::kError) == "3e");
        }).empty());
  CHECK(written_to(STDERR_FILENO, [] {
          set_log_sink({}, LogLevel::kDebug);
          logger().debug("a detail");
        }).find("[debug] a detail") != std::string::npos);
}

TEST_CASE("log: a message whose sink throws goes to the standard error stream") {
  const ToStandardError at_end;
  const std::string text = written_to(STDERR_FILENO, [] {
    set_log_sink([](LogLevel, const std::string&) { throw 7; });
    logger().warn("one");
    set_log_sink([](LogLevel, const std::string&) { throw std::runtime_error("no space"); });
    logger().warn("two");
  });
  CHECK(text.find("[warning] one\n") != std::string::npos);
  CHECK(text.find("[warning] two\n") != std::string::npos);
}

TEST_CASE("log: a sink is never called by two threads at once") {
  const ToStandardError at_end;
  std::atomic<int> inside = 0;
  std::atomic<bool> met = false;
  int count = 0;
  set_log_sink([&](LogLevel, const std::string&) {
    if (inside.fetch_add(1) != 0) met = true;
    ++count;
    std::this_thread::yield();
    inside.fetch_sub(1);
  });
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([] {
      for (int i = 0; i < 200; ++i) logger().warn("{}", i);
    });
  }
  threads.clear();
  CHECK(count == 800);
  CHECK_FALSE(met);
}

}  // namespace
}  // namespace tessera
