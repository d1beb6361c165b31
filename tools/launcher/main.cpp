// tools/launch -n 4 PROGRAM ARGS: starts local ranks, prefixes what they print, and ends them together.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/process_group.h"

namespace tessera {
namespace {

volatile sig_atomic_t pending_signal = 0;

extern "C" void remember_signal(int signal) { pending_signal = signal; }

int take_signal() {
  const int signal = pending_signal;
  if (signal != 0) pending_signal = 0;
  return signal;
}

void catch_signals() {
  struct sigaction action = {};
  action.sa_handler = remember_signal;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) ::sigaction(signal, &action, nullptr);
}

void print_line(int64_t rank, OutputStream stream, std::string_view line) {
  std::FILE* const file = stream == OutputStream::kStdout ? stdout : stderr;
  fmt::print(file, "[{}] {}\n", rank, line);
  std::fflush(file);
}

void print_bare_line(int64_t, OutputStream stream, std::string_view line) {
  std::FILE* const file = stream == OutputStream::kStdout ? stdout : stderr;
  fmt::print(file, "{}\n", line);
  std::fflush(file);
}

int launch(int64_t size, double time_limit_s, bool has_prefix, std::vector<std::string> command) {
  const PrivateFolder folder;
  ProcessGroupOptions options = {.command = std::move(command),
                                 .size = size,
                                 .store_path = folder.path() + "/store",
                                 .on_line = has_prefix ? print_line : print_bare_line,
                                 .take_signal = take_signal};
  if (time_limit_s > 0) options.time_limit = std::chrono::milliseconds(static_cast<int64_t>(time_limit_s * 1000));
  const ProcessGroupResult result = run_process_group(options);
  if (result.failure) {
    fmt::print(stderr, "launch: {}; the other ranks were ended\n", result.failure->to_string());
    return result.failure->shell_code();
  }
  if (result.timed_out) {
    fmt::print(stderr, "launch: not done after {} s; the ranks were ended\n", time_limit_s);
    return 124;
  }
  return 0;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Starts local ranks of a program, prefixes their output with [rank], passes signals on, and at the first\n"
      "failure ends the rest and returns that rank's exit code (128 + the signal for one that was killed).",
      "tools/launch");
  int64_t size = 0;
  double time_limit_s = 0;
  bool is_bare = false;
  app.add_option("-n,--ranks", size, "Number of ranks")->required()->check(CLI::Range(int64_t{1}, int64_t{4096}));
  app.add_option("--time-limit", time_limit_s, "Seconds after which all ranks are ended (exit code 124)")
      ->check(CLI::Range(0.001, 1e9));
  app.add_flag("--no-prefix", is_bare, "Print what the ranks write as it is, for programs that print on one rank alone");
  // From the first word that is no option of ours on, all is the program's.
  app.prefix_command();
  app.footer("Then the program and its arguments: tools/launch -n 4 PROGRAM ARGS");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  std::vector<std::string> command = app.remaining();
  if (!command.empty() && command.front() == "--") {
    command.erase(command.begin());
  } else if (!command.empty() && command.front().starts_with("-")) {
    fmt::print(stderr, "launch: {} is no option; see --help, and put the program's own options behind it\n",
               command.front());
    return 1;
  }
  if (command.empty()) {
    fmt::print(stderr, "launch: no program was named; for example: tools/launch -n 4 PROGRAM ARGS\n");
    return 1;
  }
  catch_signals();
  return launch(size, time_limit_s, !is_bare, std::move(command));
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    return tessera::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "launch: {}\n", error.what());
    return 1;
  }
}
