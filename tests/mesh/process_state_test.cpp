#include "tessera/mesh/process_state.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/tests/mesh/temporary_folder.h"

using namespace tessera;
using tessera::testing::TemporaryFolder;
namespace fs = std::filesystem;

namespace {

// Is a child that waits for a signal. It sends its description and begins to wait.
class Child {
 public:
  Child() {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      const std::string text = describe_this_process();
      if (::write(ends[1], text.data(), text.size()) < 0) ::_exit(1);
      ::close(ends[1]);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    char part[512];
    for (ssize_t count; (count = ::read(ends[0], part, sizeof(part))) > 0;) {
      description_.append(part, static_cast<std::size_t>(count));
    }
    ::close(ends[0]);
  }
  ~Child() {
    kill_now();
    reap();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  const std::string& description() const { return description_; }
  pid_t pid() const { return pid_; }
  // Leaves a zombie.
  void kill_now() {
    if (ended_) return;
    ::kill(pid_, SIGKILL);
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
    ended_ = true;
  }
  void reap() {
    if (reaped_) return;
    ::waitpid(pid_, nullptr, 0);
    reaped_ = true;
  }

 private:
  pid_t pid_ = 0;
  std::string description_;
  bool ended_ = false;
  bool reaped_ = false;
};

// Makes a folder like /proc, in which this process is seen as `self`, and of which single parts can be left out.
void make_proc(const std::string& path, const std::string& self) {
  const std::string mine = fmt::format("{}/{}", path, self);
  fs::create_directories(path + "/sys/kernel/random");
  fs::create_directories(mine + "/ns");
  fs::create_symlink(self, path + "/self");
  fs::create_symlink("pid:[4026531836]", mine + "/ns/pid");
  std::ofstream(path + "/sys/kernel/random/boot_id") << "6a3c\n";
  std::ofstream(fmt::format("{}/{}/stat", path, self)) << std::ifstream("/proc/self/stat").rdbuf();
}

}  // namespace

TEST_CASE("a process has ended when it is a zombie or gone, and not before") {
  Child child;
  CHECK(named_process(child.description()).starts_with(fmt::format("process {} on host ", child.pid())));
  CHECK_FALSE(process_has_ended(child.description()));
  CHECK_FALSE(process_has_ended(describe_this_process()));
  child.kill_now();
  CHECK(process_has_ended(child.description()));
  child.reap();
  CHECK(process_has_ended(child.description()));
}

TEST_CASE("a process whose number another one has now has ended") {
  const Child child;
  std::string other = child.description();
  const std::size_t start = other.find(' ') + 1;
  other.replace(start, other.find(' ', start) - start, "1");
  CHECK(process_has_ended(other));
}

TEST_CASE("without /proc nobody can tell whether a process has ended") {
  const Child child;
  CHECK_FALSE(process_has_ended(child.description(), "/no/such/folder"));
  const std::string described = describe_this_process("/no/such/folder");
  CHECK(described.find(" - ") != std::string::npos);
  CHECK_FALSE(process_has_ended(described, "/no/such/folder"));
  CHECK_FALSE(process_has_ended(described));
}

TEST_CASE("where /proc is that of another PID namespace, nobody can tell whether a process has ended") {
  const TemporaryFolder folder;
  const std::string mine = folder.path() + "/mine", other = folder.path() + "/other";
  make_proc(mine, std::to_string(::getpid()));
  make_proc(other, std::to_string(::getpid() + 1));
  fs::create_directories(fmt::format("{}/{}", other, ::getpid()));
  fs::copy(mine + "/self/stat", fmt::format("{}/{}/stat", other, ::getpid()));
  CHECK(describe_this_process(mine).find(" 6a3c:pid:[4026531836] ") != std::string::npos);
  CHECK(describe_this_process(other).find(" - ") != std::string::npos);
  // Two processes that both see the /proc of a third namespace have the same texts in it.
  Child child;
  std::string described = describe_this_process(mine);
  described.replace(0, described.find(' '), std::to_string(child.pid()));
  CHECK_FALSE(process_has_ended(described, other));
}

TEST_CASE("a process that a /proc hides, and that runs, has not ended") {
  const TemporaryFolder folder;
  make_proc(folder.path() + "/proc", std::to_string(::getpid()));
  Child child;
  std::string described = describe_this_process(folder.path() + "/proc");
  described.replace(0, described.find(' '), std::to_string(child.pid()));
  CHECK_FALSE(process_has_ended(described, folder.path() + "/proc"));
  child.kill_now();
  child.reap();
  CHECK(process_has_ended(described, folder.path() + "/proc"));
}

TEST_CASE("without the host's boot_id or the namespace nobody can tell whether a process has ended") {
  for (const std::string part : {"/sys/kernel/random/boot_id", "/self/ns/pid"}) {
    CAPTURE(part);
    const TemporaryFolder folder;
    const std::string proc = folder.path() + "/proc";
    make_proc(proc, std::to_string(::getpid()));
    fs::remove(proc + part);
    const std::string described = describe_this_process(proc);
    CHECK(described.find(" - ") != std::string::npos);
    Child child;
    child.kill_now();
    CHECK_FALSE(process_has_ended(fmt::format("{}{}", child.pid(), described.substr(described.find(' '))), proc));
  }
}

TEST_CASE("a process without a file descriptor does not take a live one for ended") {
  const Child child;
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit none = before;
  none.rlim_cur = 0;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  const bool ended = process_has_ended(child.description());
  const std::string described = describe_this_process();
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK_FALSE(ended);
  // Nor do others take it for ended, for want of its start time.
  CHECK(described.find(" - ") != std::string::npos);
  CHECK_FALSE(process_has_ended(described));
}

TEST_CASE("a description says how old it is") {
  using namespace std::chrono_literals;
  const std::string mine = describe_this_process();
  std::this_thread::sleep_for(20ms);
  CHECK(age_of(mine) >= 20ms);
  CHECK(age_of(mine) < 1min);
  CHECK(age_of("text of another kind") == 0ms);
}
