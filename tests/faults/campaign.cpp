// tools/faults: runs trials of the rows in rows.cpp, and says which promises of docs/reliability.md held.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/tests/faults/job.h"
#include "tessera/tests/faults/remains.h"
#include "tessera/tests/faults/trials.h"
#include "tessera/tests/harness/fork_server.h"
#include "tessera/tools/launcher/mpi_job.h"
#include "tessera/tools/launcher/private_folder.h"

namespace tessera::faults {
namespace {

constexpr std::size_t kAspectCount = std::size(kAspects);
constexpr std::size_t kShownOutput = 6000;

struct Arguments {
  std::string row;
  uint64_t seed = 1;
  int64_t trials = 0;
  std::string plan;
  std::string backend = "gloo";
  bool all = false;
  double sample_minutes = 0;
  std::string results;
  bool is_loud = false;
};

struct Tally {
  int64_t trials = 0;
  int64_t faults = 0;
  std::array<int64_t, kAspectCount> held{};
};

int64_t full_trials(const Row& row, const std::string& backend) {
  return backend == "mpi" ? row.mpi_trials : row.gloo_trials;
}

class Campaign {
 public:
  explicit Campaign(const Arguments& arguments) : arguments_(arguments), trials_(arguments.backend) {
    if (!arguments.results.empty()) results_.open(arguments.results, std::ios::app);
  }

  // The trials of a row have seeds that count up from the given one.
  void run_next(const Row& row) {
    Tally& tally = tallies_[row.name];
    const uint64_t seed = arguments_.seed + static_cast<uint64_t>(tally.trials);
    TrialReport report;
    try {
      report =
          arguments_.plan.empty() ? trials_.run(row, seed) : trials_.run(row, seed, parse_fault_plan(arguments_.plan));
    } catch (const std::exception& error) {
      report.misses.push_back({kAspects[0], fmt::format("the trial failed: {}", error.what())});
    }
    ++tally.trials;
    tally.faults += report.fault_came ? 1 : 0;
    late_exits_ += report.exits_late ? 1 : 0;
    for (std::size_t i = 0; i < kAspectCount; ++i) {
      const bool missed =
          std::ranges::any_of(report.misses, [&](const Miss& miss) { return miss.aspect == kAspects[i]; });
      tally.held[i] += missed ? 0 : 1;
    }
    print(row, seed, report);
    write(row, seed, report);
    has_misses_ = has_misses_ || !report.misses.empty();
  }
  int64_t done(const Row& row) { return tallies_[row.name].trials; }
  bool has_misses() const { return has_misses_; }

  void print_table() {
    fmt::print("\n| row | trials | fault came |");
    for (const char* const aspect : kAspects) fmt::print(" {} |", aspect);
    fmt::print(" of the full campaign |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (const Row& row : all_rows()) {
      const Tally& tally = tallies_[row.name];
      if (tally.trials == 0) continue;
      fmt::print("| {} | {} | {} |", row.name, tally.trials, tally.faults);
      for (const int64_t held : tally.held) fmt::print(" {} |", held);
      fmt::print(" {} |\n", full_trials(row, arguments_.backend));
    }
    fmt::print("In {} trials a survivor had said its error in time, and left later than the limit and 2 s.\n",
               late_exits_);
  }

 private:
  void print(const Row& row, uint64_t seed, const TrialReport& report) const {
    fmt::print("{} --row {} --seed {} --backend {}: {} ({:.1f} s)\n", report.misses.empty() ? "held" : "MISS", row.name,
               seed, arguments_.backend, report.what, report.seconds);
    for (const Miss& miss : report.misses) fmt::print("  {}: {}\n", miss.aspect, miss.text);
    if (!report.misses.empty() || arguments_.is_loud) {
      const std::size_t skipped = report.output.size() > kShownOutput ? report.output.size() - kShownOutput : 0;
      fmt::print("  the end of its output:\n{}\n", report.output.substr(skipped));
    }
    std::fflush(stdout);
  }

  void write(const Row& row, uint64_t seed, const TrialReport& report) {
    if (!results_.is_open()) return;
    const char* const commit = std::getenv("TESSERA_COMMIT");
    nlohmann::json line = {{"commit", commit == nullptr ? "" : commit},
                           {"row", row.name},
                           {"seed", seed},
                           {"backend", arguments_.backend},
                           {"what", report.what},
                           {"fault_came", report.fault_came},
                           {"exits_late", report.exits_late},
                           {"seconds", report.seconds},
                           {"misses", nlohmann::json::array()}};
    for (const Miss& miss : report.misses) line["misses"].push_back({{"aspect", miss.aspect}, {"text", miss.text}});
    results_ << line.dump() << std::endl;
  }

  const Arguments& arguments_;
  Trials trials_;
  std::map<std::string, Tally> tallies_;
  std::ofstream results_;
  bool has_misses_ = false;
  int64_t late_exits_ = 0;
};

// Runs the row that is the farthest behind its share, until the time is over. Every row runs at least once.
void run_sample(Campaign& campaign, const Arguments& arguments) {
  const double end = now_seconds() + 60 * arguments.sample_minutes;
  while (true) {
    const Row* next = nullptr;
    double least = 1;
    for (const Row& row : all_rows()) {
      const int64_t full = full_trials(row, arguments.backend);
      const double share = full == 0 ? 1 : static_cast<double>(campaign.done(row)) / static_cast<double>(full);
      if (share < least) {
        least = share;
        next = &row;
      }
    }
    if (next == nullptr || (least > 0 && now_seconds() > end)) return;
    campaign.run_next(*next);
  }
}

void run_rows(Campaign& campaign, const Arguments& arguments) {
  for (const Row& row : all_rows()) {
    if (!arguments.row.empty() && row.name != arguments.row) continue;
    const int64_t full = full_trials(row, arguments.backend);
    const int64_t wanted = arguments.trials > 0 ? arguments.trials : arguments.all ? full : 1;
    for (int64_t i = 0; i < (full == 0 ? 0 : wanted); ++i) campaign.run_next(row);
  }
}

int run(const Arguments& arguments) {
  if (arguments.backend == "mpi" && !has_mpirun()) {
    fmt::print("tools/faults: there is no mpirun; tools/setup installs it\n");
    return 2;
  }
  if (!arguments.row.empty() && full_trials(row_named(arguments.row), arguments.backend) == 0) {
    fmt::print("tools/faults: row {} has no trials over {}\n", arguments.row, arguments.backend);
    return 2;
  }
  // Each run of ranks has a backend of its own: states are always loaded over Gloo.
  ::unsetenv("TESSERA_BACKEND");
  // The folder for temporary files is then the campaign's own, and whatever is left there comes from a trial.
  ::unsetenv("TEST_TMPDIR");
  const PrivateFolder folder;
  ::setenv("TMPDIR", folder.path().c_str(), 1);
  const std::string why_not = use_own_shared_memory();
  if (!why_not.empty()) fmt::print("/dev/shm is shared with other programs, whose files count too ({})\n", why_not);
  Campaign campaign(arguments);
  arguments.sample_minutes > 0 ? run_sample(campaign, arguments) : run_rows(campaign, arguments);
  campaign.print_table();
  return campaign.has_misses() ? 1 : 0;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("Runs jobs in which something fails, and checks that what docs/reliability.md promises held.",
               "tools/faults");
  Arguments arguments;
  CLI::Option* const row = app.add_option("--row", arguments.row, "Run this row only");
  CLI::Option* const all = app.add_flag("--all", arguments.all, "Run the full number of trials of every row");
  app.add_option("--sample", arguments.sample_minutes, "Run a share of every row, for this number of minutes")
      ->check(CLI::Range(0.001, 1e5))
      ->excludes(row)
      ->excludes(all);
  app.add_option("--trials", arguments.trials, "Number of trials of each row; 1 if nothing is given");
  app.add_option("--seed", arguments.seed, "Seed of the first trial of each row, which decides everything about it");
  app.add_option(
         "--plan", arguments.plan,
         "With --row and --seed: the fault, as a trial printed it, such as 'rank=1 fault=kill point=save count=3'. "
         "How often a system call is made, and so the count that a seed draws, may differ from run to run")
      ->needs(row);
  app.add_option("--backend", arguments.backend, "Backend for CPU tensors")->check(CLI::IsMember({"gloo", "mpi"}));
  app.add_option("--results", arguments.results, "File to which a line of JSON is added for each trial");
  app.add_flag("--loud", arguments.is_loud, "Show the output of every trial");
  std::string rows = "The rows:";
  for (const Row& each : all_rows()) {
    rows += "\n  " + each.name + (each.not_known.empty() ? "" : ": cannot be known: " + each.not_known);
  }
  app.footer(rows);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return run(arguments);
}

}  // namespace
}  // namespace tessera::faults

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  const auto forked = tessera::testing::serve_if_fork_server();
  if (forked) arguments = *forked;
  if (arguments.size() == 5 && arguments[1] == "job") {
    at::globalContext();
    const int code = tessera::faults::run_job({arguments.begin() + 2, arguments.end()});
    // The destructors of LibTorch's static objects take a forked process a second of a core: they write to its pages.
    if (forked) ::_exit(code);
    return code;
  }
  try {
    return tessera::faults::parse_and_run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print("tools/faults: {}\n", error.what());
    return 2;
  }
}
