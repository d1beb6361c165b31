#include "tessera/tools/launcher/launch_options.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace tessera {
namespace {

// Returns how users call the launcher whose program this is. tools/launch runs "launch" or "launch-VERSION".
std::string name_of(const std::string& program) {
  const std::string name = program.substr(program.rfind('/') + 1);
  return name.empty() || name.starts_with("launch") ? "tools/launch" : name;
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
    fmt::print(stderr, "launch: no program was named; for example: {} -n 4 PROGRAM ARGS\n", app.get_name());
  }
  return command;
}

void add_times(CLI::App& app, LaunchOptions& options) {
  app.add_option("--time-limit", options.time_limit_s,
                 "Seconds after which ranks get SIGTERM, and are killed when --grace is over (exit code 124)")
      ->check(CLI::Range(0.001, 1e9));
  app.add_option(
         "--grace", options.grace_s,
         "Seconds that ranks have to end by themselves after SIGTERM, SIGINT, SIGHUP, SIGQUIT or the time limit, "
         "5 by default; then they are killed")
      ->check(CLI::Range(1.0, 1e6));
}

void add_restarts(CLI::App& app, LaunchOptions& options) {
  CLI::Option* const restarts =
      app.add_option(
             "--restarts", options.restarts,
             "How often all ranks are started again, together, after one has failed (0 by default). Each time "
             "they get a new store and the number of the restart in TORCHELASTIC_RESTART_COUNT. The time limit, "
             "SIGTERM, SIGINT, SIGHUP, SIGQUIT and output that cannot be written or has no reader any more end the job "
             "without a restart. The exit code is the last attempt's")
          ->check(CLI::Range(int64_t{0}, int64_t{1'000'000}));
  app.add_option("--min-ranks", options.min_ranks,
                 "Let each restart have one rank fewer than the attempt before, but never fewer than this; without it "
                 "each attempt has as many as the first")
      ->needs(restarts)
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
}

void add_backend(CLI::App& app, LaunchOptions& options) {
  app.add_option(
         "--backend", options.backend,
         "Backend for CPU tensors: gloo (the default), or mpi, for which the ranks become processes of one Open MPI "
         "job. Where it is not given, TESSERA_BACKEND says which")
      ->check(CLI::IsMember({"gloo", "mpi"}));
}

// Takes the backend that TESSERA_BACKEND names, if any. If it is none, prints a message and returns false.
bool take_backend_of_environment(LaunchOptions& options) {
  const char* const backend = std::getenv("TESSERA_BACKEND");
  if (backend == nullptr || *backend == '\0') return true;
  options.backend = backend;
  if (options.backend == "gloo" || options.backend == "mpi") return true;
  fmt::print(
      stderr,
      "launch: TESSERA_BACKEND is '{}', which is no backend for CPU tensors; set it to gloo or mpi, unset it, or "
      "give --backend\n",
      options.backend);
  return false;
}

}  // namespace

std::optional<LaunchOptions> parse_launch_options(int argc, char** argv, int& exit_code) {
  const std::string name = name_of(argc > 0 ? argv[0] : "");
  CLI::App app(
      "Starts local ranks of a program, prefixes their output with [rank], passes signals on, and at the first\n"
      "failure ends the rest and returns that rank's exit code (128 + the signal for one that was killed).\n"
      "While nobody reads the output, ranks that print more wait. Where its reader has gone, ranks get SIGTERM, and "
      "the\n"
      "exit code is 141; it is 1 where the output cannot be written, as to a full disk.",
      name);
  LaunchOptions options;
  app.add_option("-n,--ranks", options.size, "Number of ranks")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  add_times(app, options);
  add_restarts(app, options);
  add_backend(app, options);
  app.add_flag("--no-prefix", options.is_bare,
               "Print the ranks' output without the prefix, for programs that print on one rank only");
  // The first word that is not an option of the launcher is the program; all that follows are its arguments.
  app.prefix_command();
  app.footer(fmt::format(
      "Then the program and its arguments: {} -n 4 PROGRAM ARGS. The ranks read /dev/null as their standard input.",
      name));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error);
    return std::nullopt;
  }
  exit_code = 1;
  if (app.count("--backend") == 0 && !take_backend_of_environment(options)) return std::nullopt;
  if (std::isnan(options.time_limit_s) || std::isnan(options.grace_s)) {
    fmt::print(stderr, "launch: --time-limit or --grace is nan; give seconds\n");
    return std::nullopt;
  }
  if (options.min_ranks > options.size) {
    fmt::print(stderr, "launch: --min-ranks {} is more than the {} ranks of -n; give at most as many\n",
               options.min_ranks, options.size);
    return std::nullopt;
  }
  options.command = command_of(app);
  return options.command.empty() ? std::nullopt : std::optional(options);
}

}  // namespace tessera
