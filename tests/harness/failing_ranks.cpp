// These test cases fail, hang and die on purpose. harness_test runs this program and reads its output.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tessera/tests/harness/ranks.h"

using tessera::testing::rank;
using tessera::testing::Ranks;

namespace {

// Tells harness_test the pid of a process.
void leave_pid(pid_t pid) {
  if (const char* folder = std::getenv("TESSERA_TEST_PIDS")) std::ofstream(folder + ("/" + std::to_string(pid))) << pid;
}

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

}  // namespace

TESSERA_RANKS_TEST_CASE("all is well", {1, 3}) { CHECK(rank() < tessera::testing::world_size()); }

TESSERA_RANKS_TEST_CASE("a check fails on rank 1, and later on rank 0", {2, 4}) {
  if (rank() == 1) CHECK_MESSAGE(rank() == 10, "the first message");
  sleep_ms(300);
  if (rank() == 0) CHECK_MESSAGE(rank() == 20, "the second message");
  // Makes the rank that fails first the last one to end.
  if (rank() == 1) sleep_ms(300);
}

TESSERA_RANKS_TEST_CASE("an exception on rank 2", {3}) {
  if (rank() == 2) throw std::runtime_error("thrown by rank 2");
}

TESSERA_RANKS_TEST_CASE("rank 1 is killed, the other sees it and fails", {2}) {
  if (rank() == 1) ::kill(::getpid(), SIGKILL);
  sleep_ms(100);
  FAIL("rank 0 lost its peer");
}

TESSERA_RANKS_TEST_CASE("rank 1 hangs and has a child", Ranks({2}).time_limit(std::chrono::seconds(2))) {
  leave_pid(::getpid());
  if (rank() == 0) return;
  const pid_t child = ::fork();
  leave_pid(child == 0 ? ::getpid() : child);
  std::puts("rank 1 goes to sleep");
  std::fflush(stdout);
  while (true) ::pause();
}

TESSERA_RANKS_TEST_CASE("rank 1 ignores that it shall end", Ranks({2}).time_limit(std::chrono::seconds(1))) {
  ::signal(SIGTERM, SIG_IGN);
  while (rank() == 1) ::pause();
}

TESSERA_RANKS_TEST_CASE("all ranks wait for a long time", Ranks({3}).time_limit(std::chrono::seconds(50))) {
  leave_pid(::getpid());
  while (true) ::pause();
}

TESSERA_RANKS_TEST_CASE("every rank leaves by exit(0)", {1, 2}) {
  std::exit(0);
  CHECK(false);
}

TESSERA_RANKS_TEST_CASE("rank 1 leaves by exit(0), and then the other fails", {2}) {
  if (rank() == 1) std::exit(0);
  sleep_ms(200);
  FAIL("rank 0 waited in vain");
}

TESSERA_RANKS_TEST_CASE("rank 0 leaves by _exit(0)", {2}) {
  if (rank() == 0) ::_exit(0);
}

TESSERA_RANKS_TEST_CASE("rank 0 leaves by quick_exit(0) in its second subcase", {2}) {
  SUBCASE("one") { CHECK(true); }
  SUBCASE("two") {
    if (rank() == 0) std::quick_exit(0);
  }
}

TESSERA_RANKS_TEST_CASE("rank 1 leaves by _exit(3)", {2}) {
  if (rank() == 1) ::_exit(3);
}

TESSERA_RANKS_TEST_CASE("a child of rank 1 comes to the end in its place", {2}) {
  if (rank() == 1 && ::fork() != 0) {
    sleep_ms(300);
    ::_exit(0);
  }
}

TESSERA_RANKS_TEST_CASE("rank 1 leaves a daemon", {2}) {
  if (rank() == 0) return;
  // Forks twice, as a daemon does: the process's parent has ended, and it leads its own session.
  const pid_t between = ::fork();
  if (between != 0) {
    CHECK(::waitpid(between, nullptr, 0) == between);
    return;
  }
  ::setsid();
  const pid_t daemon = ::fork();
  if (daemon != 0) {
    leave_pid(daemon);
    ::_exit(0);
  }
  while (true) ::pause();
}

TESSERA_RANKS_TEST_CASE("no number of ranks", {}) { CHECK(false); }

TESSERA_RANKS_TEST_CASE("fewer than no ranks", {1, -2}) { CHECK(rank() == 0); }

TESSERA_RANKS_TEST_CASE("a name that two cases have", {1}) { CHECK_MESSAGE(rank() == 0, "the first one's body"); }

TESSERA_RANKS_TEST_CASE("a name that two cases have", {2}) { CHECK_MESSAGE(rank() == 0, "the second one's body"); }

TESSERA_RANKS_TEST_CASE("subcases run on each rank", {2}) {
  SUBCASE("one") { CHECK(rank() >= 0); }
  SUBCASE("two") { CHECK(rank() < 1); }
}

TESSERA_RANKS_TEST_CASE("a name, with a comma", {2}) { CHECK(tessera::testing::world_size() == 2); }

TESSERA_RANKS_TEST_CASE("rank 0 cannot run it", {1}) { TESSERA_SKIP("no unicorn here"); }

TEST_CASE("one process cannot run it") { TESSERA_SKIP("no dragon here"); }

TESSERA_RANKS_TEST_CASE("ranks check nothing", {2}) {}

TEST_CASE("one process checks nothing") {}

TEST_CASE("one process only warns") {
  WARN(1 == 1);
  WARN(1 == 2);
}

TESSERA_RANKS_TEST_CASE("ranks cannot run it for want of a program", {1, 2}) {
  CHECK(tessera::testing::world_size() == 1);
  TESSERA_SKIP_MISSING("no griffin is installed");
}

TEST_CASE("one process is skipped twice") {
  tessera::testing::skip("no dragon here");
  TESSERA_SKIP_MISSING("no griffin is installed");
}

TEST_CASE("one process fails before it is skipped") {
  CHECK(1 == 2);
  TESSERA_SKIP_MISSING("no griffin is installed");
}

TEST_CASE("threads are skipped at once") {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([] {
      CHECK(1 == 1);
      tessera::testing::skip("no dragon here");
    });
  }
  for (std::thread& each : threads) each.join();
}

TEST_CASE("a name\twith a tab") { CHECK(true); }

TESSERA_RANKS_TEST_CASE("assertions in subcases of ranks", {1, 2}) {
  CHECK(rank() < 2);
  SUBCASE("one") { CHECK(rank() < 2); }
  SUBCASE("two") {
    SUBCASE("inner") { CHECK(rank() < 2); }
  }
}

TEST_CASE("assertions in subcases of threads") {
  SUBCASE("outer") {
    std::thread other([] { CHECK(true); });
    CHECK(true);
    other.join();
  }
}
