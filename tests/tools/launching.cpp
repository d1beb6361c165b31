#include "tessera/tests/tools/launching.h"

#include <signal.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <thread>
#include <utility>

#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/private_folder.h"

namespace tessera::testing {

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool wait_until(const std::function<bool()>& holds) {
  for (int tries = 0; tries < 1000; ++tries) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

pid_t start_launch(const std::vector<std::string>& arguments, const std::string& folder) {
  std::vector<std::string> command = {"tools/launcher/launch"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const Program program(std::move(command));
  return start_child([&]() -> int {
    std::freopen((folder + "/out").c_str(), "w", stdout);
    std::freopen((folder + "/err").c_str(), "w", stderr);
    program.exec();
  });
}

int wait_or_kill(pid_t child) {
  const auto has_ended = [&] {
    siginfo_t ended = {};
    return ::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == child;
  };
  const bool ended = wait_until(has_ended);
  if (!ended) ::kill(child, SIGKILL);
  const int code = wait_for(child);
  return ended ? code : -1;
}

LaunchOutcome launch(const std::vector<std::string>& arguments) {
  const PrivateFolder folder;
  LaunchOutcome outcome;
  outcome.seconds = seconds_of([&] { outcome.exit_code = wait_for(start_launch(arguments, folder.path())); });
  outcome.out = content_of(folder.path() + "/out");
  outcome.err = content_of(folder.path() + "/err");
  return outcome;
}

LaunchOutcome launch_script(const std::string& ranks, const std::string& script) {
  return launch({"-n", ranks, "bash", "-c", script});
}

}  // namespace tessera::testing
