// A launcher that was killed leaves no process, and a folder that the next one removes.

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/text.h"
#include "tessera/tests/tools/launching.h"
#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/signal_queue.h"
#include "tessera/tools/launcher/watchdog.h"

namespace fs = std::filesystem;

using tessera::PrivateFolder;
using tessera::spawn_watchdog;
using tessera::start_child;
using tessera::wait_for;
using tessera::testing::content_of;
using tessera::testing::start_launch;
using tessera::testing::wait_or_kill;
using tessera::testing::wait_until;

namespace {

// Makes the launchers that are started while it lives put their folders into `path`.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& path) : before_(std::getenv("TEST_TMPDIR")) {
    ::setenv("TEST_TMPDIR", path.c_str(), 1);
  }
  ~TemporaryFolder() { ::setenv("TEST_TMPDIR", before_.c_str(), 1); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

 private:
  const std::string before_;
};

std::vector<std::string> folders_in(const std::string& path) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(path)) found.push_back(entry.path().string());
  return found;
}

// Returns the process that wrote its number into the file, once it is there.
pid_t pid_in(const std::string& file) {
  CHECK(wait_until([&] { return content_of(file).ends_with('\n'); }));
  return static_cast<pid_t>(std::stol("0" + content_of(file)));
}

bool is_gone(pid_t pid) { return ::kill(pid, 0) != 0; }

// Returns the mask of the signals for which the process has a handler, in hexadecimal digits.
std::string caught_signals(pid_t pid) {
  const std::string status = content_of("/proc/" + std::to_string(pid) + "/status"), name = "SigCgt:\t";
  const std::size_t mask = status.find(name);
  REQUIRE(mask != std::string::npos);
  return status.substr(mask + name.size(), 16);
}

// Leaves a folder as a process does that is killed, and returns its path.
std::string abandon_folder(const std::string& parent) {
  wait_for(start_child([&]() -> int {
    const PrivateFolder folder(parent);
    std::ofstream(folder.path() + "/file") << "content";
    ::kill(::getpid(), SIGKILL);
    return 0;
  }));
  const std::vector<std::string> found = folders_in(parent);
  REQUIRE(found.size() == 1);
  return found[0];
}

// Sends the signal to this process's group every 0.2 ms until it is killed. Returns its pid.
pid_t start_sender(int signal) {
  return start_child([=]() -> int {
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, signal);
    ::sigprocmask(SIG_BLOCK, &blocked, nullptr);
    while (true) {
      ::kill(0, signal);
      ::usleep(200);
    }
  });
}

}  // namespace

TEST_CASE("launch: the next one removes the folder that a killed one has left, and none that is in use") {
  const PrivateFolder folder;
  const std::string parent = folder.path() + "/tmp";
  REQUIRE(fs::create_directory(parent));
  const TemporaryFolder here(parent);
  const auto start = [&](const std::string& name) {
    return start_launch(
        {"-n", "1", "bash", "-c", "dirname $TESSERA_STORE >" + folder.path() + "/" + name + "; sleep 1000"},
        folder.path());
  };
  const pid_t killed = start("killed");
  const pid_t running = start("running");
  for (const char* name : {"/killed", "/running"}) {
    CHECK(wait_until([&] { return content_of(folder.path() + name).ends_with('\n'); }));
  }
  ::kill(killed, SIGKILL);
  wait_for(killed);
  CHECK(folders_in(parent).size() == 2);
  CHECK(wait_for(start_launch({"-n", "1", "true"}, folder.path())) == 0);
  const std::string in_use = content_of(folder.path() + "/running");
  CHECK(folders_in(parent) == std::vector<std::string>{in_use.substr(0, in_use.size() - 1)});
  ::kill(running, SIGTERM);
  wait_or_kill(running);
  CHECK(fs::is_empty(parent));
}

TEST_CASE("remove_abandoned_folders: removes what an ended process has left") {
  const PrivateFolder folder;
  const std::string left = abandon_folder(folder.path());
  CHECK(fs::exists(left + "/file"));
  tessera::remove_abandoned_folders(folder.path());
  CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("remove_abandoned_folders: leaves folders in use, other names, files, and what links lead to") {
  const PrivateFolder folder, elsewhere;
  const std::string left = abandon_folder(folder.path());
  const std::string at = folder.path() + "/";
  fs::rename(left, at + "kept");                            // without the name
  const std::string own = left.substr(0, left.size() - 6);  // how the names of this host's folders begin
  for (const std::string& name : {own + "abcdefg", own, at + "tessera-abcdef", at + "tessera-owned-abcdef"})
    fs::create_directory(name);
  std::ofstream(elsewhere.path() + "/file") << "content";
  fs::create_directory(elsewhere.path() + "/below");
  fs::create_directory_symlink(elsewhere.path() + "/below", own + "linked");
  std::ofstream(own + "afile0") << "content";
  const PrivateFolder in_use(folder.path());
  fs::create_directory(own + "inside");
  fs::create_directory_symlink(elsewhere.path(), own + "inside/link");
  tessera::remove_abandoned_folders(folder.path());
  for (const std::string& kept :
       {at + "kept/file", own + "abcdefg", own, at + "tessera-abcdef", at + "tessera-owned-abcdef", own + "linked",
        own + "afile0", in_use.path(), elsewhere.path() + "/file", elsewhere.path() + "/below"}) {
    CAPTURE(kept);
    CHECK(fs::exists(kept));
  }
  CHECK_FALSE(fs::exists(own + "inside"));
}

TEST_CASE("remove_abandoned_folders: leaves the folders of other hosts, whose locks may not be seen here") {
  const PrivateFolder folder;
  const std::string left = abandon_folder(folder.path());
  // The name of a folder is tessera-owned-HOST-XXXXXX, where HOST has eight digits.
  std::string other = left;
  char& digit = other.at(other.size() - 6 - 1 - 8);
  digit = digit == '0' ? '1' : '0';
  fs::rename(left, other);
  tessera::remove_abandoned_folders(folder.path());
  CHECK(fs::exists(other + "/file"));
  fs::rename(other, left);
  tessera::remove_abandoned_folders(folder.path());
  CHECK_FALSE(fs::exists(left));
}

// A launcher that starts ranks before its watchdog is ready, and is killed then, leaves them.
TEST_CASE("spawn_watchdog: returns once the watchdog would see that its parent dies") {
  cpu_set_t all, one;
  REQUIRE(::sched_getaffinity(0, sizeof(all), &all) == 0);
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(::sched_getcpu()), &one);
  ::sched_setaffinity(0, sizeof(one), &one);  // so that the watchdog runs only while this process waits
  const pid_t watchdog = spawn_watchdog("");
  CHECK(::getpgid(watchdog) == watchdog);
  CHECK(caught_signals(watchdog) != caught_signals(::getpid()));  // it has a handler of that death's signal
  ::sched_setaffinity(0, sizeof(all), &all);
  ::kill(watchdog, SIGKILL);
  CHECK(wait_for(watchdog) == 1000 + SIGKILL);
}

TEST_CASE("spawn_watchdog: a signal to the caller's group, which it passes on to ranks, does not end the watchdog") {
  CHECK(wait_for(start_child([]() -> int {
          ::setpgid(0, 0);
          const tessera::SignalQueue signals;
          const pid_t sender = start_sender(SIGUSR1);
          int ended = 0;
          for (int i = 0; i < 300; ++i) {
            const pid_t watchdog = spawn_watchdog("");
            ended += ::waitpid(watchdog, nullptr, WNOHANG) == 0 ? 0 : 1;
            ::kill(watchdog, SIGKILL);
            ::waitpid(watchdog, nullptr, 0);
          }
          ::kill(sender, SIGKILL);
          wait_for(sender);
          return ended == 0 ? 0 : 1;
        })) == 0);
}

TEST_CASE("launch: a process that left its rank's session does not outlive a killed launcher") {
  const PrivateFolder folder;
  const std::string file = folder.path() + "/pid";
  const pid_t launcher =
      start_launch({"-n", "1", "bash", "-c", "setsid bash -c 'echo $$ >" + file + "; sleep 1000; sleep 1000' & wait"},
                   folder.path());
  const pid_t left = pid_in(file);
  REQUIRE(left > 0);
  CHECK_FALSE(is_gone(left));
  ::kill(launcher, SIGKILL);
  wait_for(launcher);
  CHECK(wait_until([&] { return is_gone(left); }));
}

TEST_CASE("launch: nothing of a launcher that a rank started outlives a killed launcher") {
  const PrivateFolder folder;
  const std::string file = folder.path() + "/pid", nested = folder.path() + "/nested.sh";
  std::ofstream(nested) << "setsid bash -c 'echo $$ >" + file + "; sleep 1000; sleep 1000' & wait\n";
  const pid_t launcher = start_launch({"-n", "1", "tools/launcher/launch", "-n", "1", "bash", nested}, folder.path());
  const pid_t left = pid_in(file);
  REQUIRE(left > 0);
  ::kill(launcher, SIGKILL);
  wait_for(launcher);
  CHECK(wait_until([&] { return is_gone(left); }));
}
