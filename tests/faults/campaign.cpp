// tools/faults: runs trials of the rows in rows.cpp, and says which promises of docs/reliability.md held.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
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
  double minutes = 0;
  std::string results;
  bool is_loud = false;
};

struct Tally {
  int64_t trials() const { return static_cast<int64_t>(seeds.size()); }

  std::set<uint64_t> seeds;
  int64_t faults = 0;
  std::array<int64_t, kAspectCount> held{};
};

int64_t full_trials(const Row& row, const std::string& backend) {
  return backend == "mpi" ? row.mpi_trials : row.gloo_trials;
}

class Campaign {
 public:
  explicit Campaign(const Arguments& arguments) : arguments_(arguments), trials_(arguments.backend) {
    if (const char* const commit = std::getenv("TESSERA_COMMIT"); commit != nullptr) commit_ = commit;
    if (arguments.results.empty()) return;
    if (arguments.plan.empty()) read_results();
    results_.open(arguments.results, std::ios::app);
    check_results();
  }

  // The trials of a row have seeds that count up from the given one, without those that have run.
  void run_next(const Row& row) {
    const std::set<uint64_t>& seeds = tallies_[row.name].seeds;
    uint64_t seed = arguments_.seed;
    while (seeds.contains(seed)) ++seed;
    TrialReport report;
    try {
      report =
          arguments_.plan.empty() ? trials_.run(row, seed) : trials_.run(row, seed, parse_fault_plan(arguments_.plan));
    } catch (const std::exception& error) {
      report.misses.push_back({kAspects[0], fmt::format("the trial failed: {}", error.what())});
    }
    print(row, seed, report);
    const nlohmann::json line = as_line(row, seed, report);
    if (results_.is_open()) results_ << line.dump() << std::endl;
    check_results();
    count(line);
  }
  int64_t done(const Row& row) { return tallies_[row.name].trials(); }
  bool has_misses() const { return has_misses_; }

  void print_table() {
    fmt::print("\n| row | trials | fault came |");
    for (const char* const aspect : kAspects) fmt::print(" {} |", aspect);
    fmt::print(" of the full campaign |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (const Row& row : all_rows()) {
      const Tally& tally = tallies_[row.name];
      if (tally.trials() == 0) continue;
      fmt::print("| {} | {} | {} |", row.name, tally.trials(), tally.faults);
      for (const int64_t held : tally.held) fmt::print(" {} |", held);
      fmt::print(" {} |\n", full_trials(row, arguments_.backend));
    }
    fmt::print("In {} trials a survivor had said its error in time, and left later than the limit and 2 s.\n",
               late_exits_);
  }

 private:
  void check_results() const {
    if (!results_) throw std::runtime_error(fmt::format("--results: cannot write {}", arguments_.results));
  }

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

  nlohmann::json as_line(const Row& row, uint64_t seed, const TrialReport& report) const {
    nlohmann::json line = {{"commit", commit_},
                           {"row", row.name},
                           {"seed", seed},
                           {"backend", arguments_.backend},
                           {"what", report.what},
                           {"fault_came", report.fault_came},
                           {"exits_late", report.exits_late},
                           {"seconds", report.seconds},
                           {"misses", nlohmann::json::array()}};
    for (const Miss& miss : report.misses) line["misses"].push_back({{"aspect", miss.aspect}, {"text", miss.text}});
    return line;
  }

  void count(const nlohmann::json& line) {
    Tally& tally = tallies_[line.at("row").get<std::string>()];
    if (!tally.seeds.insert(line.at("seed").get<uint64_t>()).second) return;
    tally.faults += line.at("fault_came").get<bool>() ? 1 : 0;
    late_exits_ += line.at("exits_late").get<bool>() ? 1 : 0;
    for (std::size_t i = 0; i < kAspectCount; ++i) {
      const bool missed = std::ranges::any_of(
          line.at("misses"), [&](const nlohmann::json& miss) { return miss.at("aspect") == kAspects[i]; });
      tally.held[i] += missed ? 0 : 1;
    }
    has_misses_ = has_misses_ || !line.at("misses").empty();
  }

  // Counts the trials of this commit and backend that the file of results has.
  void read_results() {
    std::ifstream in(arguments_.results);
    for (std::string text; std::getline(in, text);) {
      const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
      if (line.is_discarded()) continue;  // the last line of a campaign that was killed
      if (line.at("commit") == commit_ && line.at("backend") == arguments_.backend) count(line);
    }
  }

  const Arguments& arguments_;
  Trials trials_;
  std::string commit_;
  std::map<std::string, Tally> tallies_;
  std::ofstream results_;
  bool has_misses_ = false;
  int64_t late_exits_ = 0;
};

// Runs the row that is the farthest behind its share, until all have run in full or the time is over, but every row at
// least once.
void run_all(Campaign& campaign, const Arguments& arguments) {
  const double end = now_seconds() + 60 * arguments.minutes;
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
    if (next == nullptr || (least > 0 && arguments.minutes > 0 && now_seconds() > end)) return;
    campaign.run_next(*next);
  }
}

void run_rows(Campaign& campaign, const Arguments& arguments) {
  for (const Row& row : all_rows()) {
    if (!arguments.row.empty() && row.name != arguments.row) continue;
    if (full_trials(row, arguments.backend) == 0) continue;
    const int64_t wanted = std::max<int64_t>(arguments.trials, 1);
    for (int64_t i = 0; i < wanted; ++i) campaign.run_next(row);
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
  arguments.all ? run_all(campaign, arguments) : run_rows(campaign, arguments);
  campaign.print_table();
  return campaign.has_misses() ? 1 : 0;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("Runs jobs in which something fails, and checks that what docs/reliability.md promises held.",
               "tools/faults");
  Arguments arguments;
  CLI::Option* const row = app.add_option("--row", arguments.row, "Run this row only");
  CLI::Option* const all = app.add_flag("--all", arguments.all, "Run the full number of trials of every row");
  all->excludes(row);
  app.add_option("--minutes", arguments.minutes,
                 "With --all: end after this number of minutes, and a trial of each row")
      ->check(CLI::Range(0.001, 1e5))
      ->needs(all);
  app.add_option("--trials", arguments.trials, "Number of trials of each row; 1 if nothing is given")->excludes(all);
  app.add_option("--seed", arguments.seed, "Seed of the first trial of each row, which decides everything about it");
  app.add_option(
         "--plan", arguments.plan,
         "With --row and --seed: the fault, as a trial printed it, such as 'rank=1 fault=kill point=save count=3'. "
         "How often a system call is made, and so the count that a seed draws, may differ from run to run")
      ->needs(row);
  app.add_option("--backend", arguments.backend, "Backend for CPU tensors")->check(CLI::IsMember({"gloo", "mpi"}));
  app.add_option(
      "--results", arguments.results,
      "File to which a line of JSON is added for each trial. Trials of this commit that it has are not run again, "
      "and count in the table");
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
