#include "tessera/tests/faults/launcher_trial.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <stdexcept>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/rank_environment.h"

namespace tessera::faults {
namespace {

constexpr int kLines = 1500;
constexpr double kGrace = 2;       // of the launcher
constexpr double kEndsWithin = 4;  // the grace, a second between SIGTERM and SIGKILL, and one to see it
constexpr double kLongest = 40;    // of a whole trial

// Runs the launcher, and reads what it prints.
class Launcher {
 public:
  Launcher(const std::vector<std::string>& arguments, const std::string& folder) {
    std::vector<std::string> environment = {"TMPDIR=" + folder, "TESSERA_TIMEOUT=2", "TESSERA_FAULTS_SLOW=700"};
    for (const auto& [name, value] : environment_without_launchers()) {
      if (name != "TMPDIR") environment.push_back(name + "=" + value);
    }
    const Program program(arguments, environment);
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe can be made for the launcher's output");
    pid_ = start_child([&]() -> int {
      use_default_signals();
      ::dup2(ends[1], STDOUT_FILENO);
      ::dup2(ends[1], STDERR_FILENO);
      program.exec();
    });
    ::close(ends[1]);
    output_ = ends[0];
  }
  ~Launcher() {
    if (output_ >= 0) ::close(output_);
    if (is_running()) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Reads for ten milliseconds at most.
  void read_some() {
    pollfd polled = {output_, POLLIN, 0};
    if (output_ < 0 || ::poll(&polled, 1, 10) <= 0) {
      if (output_ < 0) ::usleep(5000);
      return;
    }
    char part[65536];
    const ssize_t count = ::read(output_, part, sizeof(part));
    if (count <= 0) return close_output();
    text_.append(part, static_cast<std::size_t>(count));
  }
  bool read_until(const std::string& words) {
    const double end = now_seconds() + kLongest;
    while (text_.find(words) == std::string::npos && is_running() && now_seconds() < end) read_some();
    return text_.find(words) != std::string::npos;
  }
  bool is_running() {
    if (pid_ != 0 && ::waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = 0;
    return pid_ != 0;
  }
  // Returns whether it ended in time.
  bool wait(double seconds) {
    const double end = now_seconds() + seconds;
    while (is_running() && now_seconds() < end) read_some();
    if (is_running()) return false;
    for (int i = 0; i < 20 && output_ >= 0; ++i) read_some();
    return true;
  }
  void close_output() {
    if (output_ >= 0) ::close(output_);
    output_ = -1;
  }
  void signal(int number) const {
    if (pid_ != 0) ::kill(pid_, number);
  }
  // Returns the exit code, or 128 and the signal.
  int code() const { return WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_); }
  const std::string& text() const { return text_; }

 private:
  pid_t pid_ = 0;
  int output_ = -1;
  int status_ = 0;
  std::string text_;
};

std::string launcher_program() {
  const char* const launch = std::getenv("TESSERA_LAUNCH");
  return launch == nullptr ? "tools/launcher/launch" : launch;
}

std::vector<std::string> command(const std::string& backend, const std::vector<std::string>& job) {
  std::vector<std::string> all = {launcher_program(),
                                  "-n",
                                  "2",
                                  "--grace",
                                  fmt::format("{}", kGrace),
                                  "--backend",
                                  backend,
                                  "--",
                                  std::filesystem::read_symlink("/proc/self/exe"),
                                  "job"};
  all.insert(all.end(), job.begin(), job.end());
  return all;
}

// A launcher that is killed cannot remove its folders; the next start does.
void start_another(const std::string& temporary_folder, Outcome& outcome) {
  Launcher next({launcher_program(), "-n", "1", "--", "true"}, temporary_folder);
  if (!next.wait(kEndsWithin)) outcome.found.emplace("in time", "the next start of the launcher does not end");
}

int number_of(const std::string& signal) { return signal == "INT" ? SIGINT : signal == "TERM" ? SIGTERM : SIGKILL; }

void send_signal(Launcher& launcher, const FaultPlan& plan, Outcome& outcome) {
  if (plan.point == "start") ::usleep(static_cast<useconds_t>(10'000 * plan.count));
  if (plan.point == "run") launcher.read_until(fmt::format("state {}", plan.count));
  if (plan.point == "end") launcher.read_until("done");
  const int signal = number_of(plan.fault);
  launcher.signal(signal);
  if (!launcher.wait(kEndsWithin)) {
    outcome.found.emplace("in time", fmt::format("the launcher still runs {} s after SIG{}", kEndsWithin, plan.fault));
  } else if (launcher.code() != 0 && launcher.code() != 128 + signal) {
    outcome.found.emplace("named", fmt::format("the launcher ended with {} after SIG{}", launcher.code(), plan.fault));
  }
}

void close_early(Launcher& launcher, const FaultPlan& plan, Outcome& outcome) {
  if (plan.point == "run") launcher.read_until(fmt::format("line {:06d}", plan.count * 100));
  if (plan.point == "end") launcher.read_until("done");
  launcher.close_output();
  // Before its first line the launcher cannot see it.
  if (!launcher.wait(kEndsWithin + (plan.point == "start" ? 4 : 0))) {
    outcome.found.emplace("in time", "the launcher still runs after its output was closed");
  }
}

void leave_unread(Launcher& launcher, const FaultPlan& plan, Outcome& outcome) {
  if (plan.point == "run") launcher.read_until(fmt::format("line {:06d}", plan.count * 100));
  if (plan.point == "end") launcher.read_until(fmt::format("line {:06d}", kLines - 100));
  ::usleep(1'000'000);
  if (!launcher.wait(kLongest)) outcome.found.emplace("in time", "the launcher does not end");
  int64_t lines = 0;
  for (std::size_t at = 0; (at = launcher.text().find("] line ", at)) != std::string::npos; ++at) ++lines;
  if (launcher.code() == 0 && lines == 2 * kLines) return;
  outcome.found.emplace("data whole", fmt::format("the launcher ended with {} and passed {} of {} lines on",
                                                  launcher.code(), lines, 2 * kLines));
}

// Returns the newest step that a rank reported as saved; 0 if none.
int64_t newest_saved(const std::string& text) {
  static const std::regex saved("saved ([0-9]+)");
  int64_t newest = 0;
  for (auto each = std::sregex_iterator(text.begin(), text.end(), saved); each != std::sregex_iterator(); ++each) {
    newest = std::max<int64_t>(newest, std::stoll((*each)[1]));
  }
  return newest;
}

}  // namespace

std::string run_launcher_trial(const Row& row, const FaultPlan& plan, const std::string& backend,
                               const std::string& folder, Outcome& outcome) {
  const bool signals = row.kind == Kind::kLauncherSignal;
  const std::vector<std::string> job = signals ? std::vector<std::string>{"train", folder, "1"}
                                               : std::vector<std::string>{"talk", folder, std::to_string(kLines)};
  std::string text;
  {
    Launcher launcher(command(backend, job), folder + "/tmp");
    if (signals) send_signal(launcher, plan, outcome);
    if (plan.fault == "closed") close_early(launcher, plan, outcome);
    if (plan.fault == "stalled") leave_unread(launcher, plan, outcome);
    text = launcher.text();
  }
  if (plan.fault == "KILL") start_another(folder + "/tmp", outcome);
  outcome.newest_reported = newest_saved(text);
  return text;
}

}  // namespace tessera::faults
