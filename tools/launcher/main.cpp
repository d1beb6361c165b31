// tools/launch -n 4 PROGRAM ARGS: starts local ranks, prefixes what they print, and ends them together.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "tessera/tools/launcher/mpi_job.h"
#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/process_group.h"

namespace tessera {
namespace {

volatile sig_atomic_t pending_signal = 0;

extern "C" void remember_signal(int signal) { pending_signal = signal; }

// Nobody reads the output any more: the ranks get SIGTERM, once. Without a handler this process would end at once and
// leave its folder.
extern "C" void remember_closed_output(int) {
  static volatile sig_atomic_t is_first = 1;
  if (is_first != 0) pending_signal = SIGTERM;
  is_first = 0;
}

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
  action.sa_handler = remember_closed_output;
  ::sigaction(SIGPIPE, &action, nullptr);
}

void print_line(int64_t rank, OutputStream stream, std::string_view line) {
  std::FILE* const file = stream == OutputStream::kStdout ? stdout : stderr;
  // Unlike fmt::print, fputs does not throw where the output was closed: the ranks then have the time of a signal.
  std::fputs(fmt::format("[{}] {}\n", rank, line).c_str(), file);
  std::fflush(file);
}

void print_bare_line(int64_t, OutputStream, std::string_view line) {
  std::fputs(fmt::format("{}\n", line).c_str(), stderr);
}

// A program may write text that is no line yet, and bytes that are no text.
void pass_on(int64_t, std::string_view bytes) {
  std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  std::fflush(stdout);
}

struct Arguments {
  int64_t size = 0;
  double time_limit_s = 0;
  double grace_s = 5;
  bool is_bare = false;
  std::string backend;  // empty when it is not given
  std::vector<std::string> command;
};

int launch(const Arguments& arguments) {
  const PrivateFolder folder;
  const double time_limit_s = arguments.time_limit_s;
  ProcessGroupOptions options = {.command = arguments.command,
                                 .size = arguments.size,
                                 .store_path = folder.path() + "/store",
                                 .on_line = arguments.is_bare ? print_bare_line : print_line,
                                 .take_signal = take_signal};
  if (arguments.is_bare) options.on_output = pass_on;
  // SIGTERM comes a second before SIGKILL.
  options.signal_grace = std::chrono::milliseconds(static_cast<int64_t>((arguments.grace_s - 1) * 1000));
  if (time_limit_s > 0) options.time_limit = std::chrono::milliseconds(static_cast<int64_t>(time_limit_s * 1000));
  if (!arguments.backend.empty()) options.environment["TESSERA_BACKEND"] = arguments.backend;
  std::optional<MpiJob> mpi;
  if (arguments.backend == "mpi") {
    mpi.emplace(arguments.size);
    options.rank_variables = [&](int64_t rank) { return mpi->variables(rank); };
  }
  const ProcessGroupResult result = run_process_group(options);
  if (result.failure) {
    std::fputs(fmt::format("launch: {}; the other ranks were ended\n", result.failure->to_string()).c_str(), stderr);
    return result.failure->shell_code();
  }
  if (result.timed_out) {
    fmt::print(stderr, "launch: not done after {} s; the ranks were ended\n", time_limit_s);
    return 124;
  }
  return 0;
}

// Returns the program and its arguments, which follow the launcher's own options. If there is none, prints a message
// and returns an empty list.
std::vector<std::string> command_of(const CLI::App& app) {
  std::vector<std::string> command = app.remaining();
  if (!command.empty() && command.front() == "--") {
    command.erase(command.begin());
  } else if (!command.empty() && command.front().starts_with("-")) {
    fmt::print(stderr, "launch: {} is no option; see --help, and put the program's own options behind it\n",
               command.front());
    return {};
  }
  if (command.empty()) {
    fmt::print(stderr, "launch: no program was named; for example: tools/launch -n 4 PROGRAM ARGS\n");
  }
  return command;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Starts local ranks of a program, prefixes their output with [rank], passes signals on, and at the first\n"
      "failure ends the rest and returns that rank's exit code (128 + the signal for one that was killed).",
      "tools/launch");
  Arguments arguments;
  app.add_option("-n,--ranks", arguments.size, "Number of ranks")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  app.add_option("--time-limit", arguments.time_limit_s, "Seconds after which all ranks are ended (exit code 124)")
      ->check(CLI::Range(0.001, 1e9));
  app.add_option("--grace", arguments.grace_s,
                 "Seconds that ranks have to end by themselves after SIGTERM, SIGINT, SIGHUP or SIGQUIT, 5 by default; "
                 "then they are killed")
      ->check(CLI::Range(1.0, 1e6));
  app.add_option(
         "--backend", arguments.backend,
         "Backend for CPU tensors: gloo (the default), or mpi, for which the ranks become processes of one Open MPI "
         "job")
      ->envname("TESSERA_BACKEND")
      ->check(CLI::IsMember({"gloo", "mpi"}));
  app.add_flag("--no-prefix", arguments.is_bare,
               "Print the ranks' output without the prefix, for programs that print on one rank only");
  // The first word that is not an option of the launcher is the program; all that follows are its arguments.
  app.prefix_command();
  app.footer("Then the program and its arguments: tools/launch -n 4 PROGRAM ARGS");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  arguments.command = command_of(app);
  if (arguments.command.empty()) return 1;
  catch_signals();
  return launch(arguments);
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
