// Measures saves and loads of a training state: beside cp of the same files and torch.distributed.checkpoint, and what
// an asynchronous save costs the training, beside memcpy of the same bytes.

#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/checkpoint_rank.h"
#include "tessera/bench/measure.h"
#include "tessera/bench/paired.h"
#include "tessera/bench/two_sides.h"

namespace {

using namespace tessera::bench;

constexpr double kMostOfCopy = 1.25;

// Holds a folder for the states of both sides, beside the working folder or where the user says.
class Folder {
 public:
  explicit Folder(const std::string& parent) {
    std::string pattern = parent + "/tessera_bench_XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("there is no folder " + pattern);
    path_ = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Returns the microseconds of a command of the shell.
double time_command(const std::string& command) {
  const auto begin = std::chrono::steady_clock::now();
  if (std::system(command.c_str()) != 0) throw std::runtime_error("it failed: " + command);
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

struct StateRow {
  int64_t ranks = 0;
  std::string layout;
  double bytes = 0;                                  // of the whole state
  std::map<std::string, std::vector<double>> times;  // microseconds of the slowest rank, by round
  double first_start = 0, first_copy = 0;            // into fresh memory
  double held = 0, peak = 0;                         // bytes of the rank with most

  std::string name() const { return fmt::format("{} ranks, {}", ranks, layout); }
  double gigabytes_per_second(const std::string& what) const { return bytes / figure_of(times.at(what)).median / 1000; }
  Ratio ratio(const std::string& a, const std::string& b) const { return ratio_of(times.at(a), times.at(b)); }
};

// One round of what is saved and loaded in a blocking way. cp writes files that are not synced, so that `sync` follows
// where it stands beside a save.
void measure_whole(TwoSides& sides, const Folder& folder, StateRow& row) {
  const std::string ours = folder / "ours", peer = folder / "peer", copy = folder / "copy";
  row.times["save"].push_back(slowest(sides.ours, "save " + ours));
  row.times["load"].push_back(slowest(sides.ours, "load " + ours));
  row.times["peer_save"].push_back(slowest(sides.peer, "save " + peer));
  row.times["peer_load"].push_back(slowest(sides.peer, "load " + peer));
  row.times["cp"].push_back(time_command("cp -r " + ours + " " + copy));
  row.times["cp_synced"].push_back(row.times["cp"].back() + time_command("sync " + copy + "/*/*"));
  std::filesystem::remove_all(copy);
}

void measure_asynchronous(TwoSides& sides, const Folder& folder, StateRow& row, int steps) {
  const std::string ours = folder / "async", peer = folder / "peer_async";
  const std::string run = fmt::format("steps {}", steps);
  row.times["steps"].push_back(slowest(sides.ours, run));
  row.times["copy"].push_back(slowest(sides.ours, "copy touched"));
  row.times["start"].push_back(slowest(sides.ours, "start " + ours));
  row.times["steps_while_saving"].push_back(slowest(sides.ours, run));
  slowest(sides.ours, "wait -");
  row.times["peer_steps"].push_back(slowest(sides.peer, run));
  row.times["peer_start"].push_back(slowest(sides.peer, "start " + peer));
  row.times["peer_steps_while_saving"].push_back(slowest(sides.peer, run));
  slowest(sides.peer, "wait -");
}

// Throws where a load does not bring back what was saved.
void check_loads(Ranks& ranks, const std::string& folder) {
  const std::vector<std::string> before = ranks.ask("digest -");
  ranks.ask("save " + folder);
  ranks.ask("spoil -");
  const std::vector<std::string> spoiled = ranks.ask("digest -");
  ranks.ask("load " + folder);
  if (spoiled != before && ranks.ask("digest -") == before) return;
  throw std::runtime_error(fmt::format("the state that was loaded from '{}' is not the one that was saved", folder));
}

StateRow measure(int64_t ranks, const std::string& layout, int64_t megabytes, int steps, const std::string& parent,
                 TwoSides& sides, const SidesArguments& arguments) {
  const Folder folder(parent);
  StateRow row{.ranks = ranks, .layout = layout};
  const std::string text = fmt::format("case {} {}", layout, megabytes);
  row.bytes = slowest(sides.ours, text) * static_cast<double>(ranks);
  slowest(sides.peer, text);
  check_loads(sides.ours, folder / "ours");
  check_loads(sides.peer, folder / "peer");
  row.held = slowest(sides.ours, "held -");
  row.first_copy = slowest(sides.ours, "copy fresh");
  row.first_start = slowest(sides.ours, "fresh " + (folder / "async"));
  slowest(sides.ours, "wait -");
  for (int round = 0; round < arguments.rounds; ++round) measure_whole(sides, folder, row);
  for (int round = 0; round < arguments.rounds; ++round) measure_asynchronous(sides, folder, row, steps);
  row.peak = slowest(sides.ours, "peak " + (folder / "peak"));
  return row;
}

void print_row(const StateRow& row) {
  fmt::print("\n{}: a state of {:.0f} MB\n", row.name(), row.bytes / 1e6);
  for (const char* what : {"save", "cp_synced", "peer_save", "load", "cp", "peer_load"})
    fmt::print("  {:<28}{:>8.2f} GB/s\n", what, row.gigabytes_per_second(what));
  const auto milliseconds = [&](const char* what) { return figure_of(row.times.at(what)).median / 1000; };
  fmt::print("  asynchronous, the first:    stall {:.1f} ms, memcpy into fresh memory {:.1f} ms\n",
             row.first_start / 1000, row.first_copy / 1000);
  fmt::print("  from the second on:         stall {:.1f} ms, memcpy {:.1f} ms, ratio {}; PyTorch {:.1f} ms\n",
             milliseconds("start"), milliseconds("copy"), to_string(row.ratio("start", "copy")),
             milliseconds("peer_start"));
  fmt::print("  the next steps:             {} of their time; PyTorch {}\n",
             to_string(row.ratio("steps_while_saving", "steps")),
             to_string(row.ratio("peer_steps_while_saving", "peer_steps")));
  fmt::print("  a rank's peak:              {:.0f} MB, {:.0f} MB before\n", row.peak / 1e6, row.held / 1e6);
  std::fflush(stdout);
}

std::vector<Goal> goals_of(const std::vector<StateRow>& rows) {
  std::vector<Goal> out;
  for (const StateRow& row : rows) {
    const Ratio ratio = row.ratio("start", "copy");
    out.push_back({fmt::format("{}: the stall of an asynchronous save over memcpy: at most {}: {}", row.name(),
                               kMostOfCopy, to_string(ratio)),
                   ratio.median <= kMostOfCopy});
  }
  return out;
}

nlohmann::json json_of(const StateRow& row) {
  nlohmann::json out = {{"name", row.name()},
                        {"ranks", row.ranks},
                        {"layout", row.layout},
                        {"bytes", row.bytes},
                        {"held_bytes", row.held},
                        {"peak_bytes", row.peak},
                        {"first_start_us", row.first_start},
                        {"first_copy_us", row.first_copy}};
  for (const auto& [what, times] : row.times) out[what + "_us"] = figure_of(times).median;
  put(out, "start_to_copy", row.ratio("start", "copy"));
  put(out, "peer_start_to_start", row.ratio("peer_start", "start"));
  put(out, "peer_save_to_save", row.ratio("peer_save", "save"));
  put(out, "peer_load_to_load", row.ratio("peer_load", "load"));
  put(out, "save_to_cp", row.ratio("save", "cp_synced"));
  put(out, "load_to_cp", row.ratio("load", "cp"));
  put(out, "steps_while_saving_to_steps", row.ratio("steps_while_saving", "steps"));
  return out;
}

bool run(const SidesArguments& arguments, const std::vector<std::string>& layouts, int64_t megabytes, int steps,
         const std::string& parent) {
  std::vector<StateRow> rows;
  for (const int64_t ranks : arguments.ranks) {
    TwoSides sides(arguments, ranks);
    for (const std::string& layout : layouts) {
      rows.push_back(measure(ranks, layout, megabytes, steps, parent, sides, arguments));
      print_row(rows.back());
    }
  }
  const bool met = print_goals(goals_of(rows));
  if (!arguments.json.empty()) {
    nlohmann::json out = nlohmann::json::array();
    for (const StateRow& row : rows) out.push_back(json_of(row));
    write_json(arguments.json, "checkpoint", out);
  }
  return met || !arguments.check;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Saves and loads of a training state, beside cp, memcpy and torch.distributed.checkpoint");
  SidesArguments arguments;
  arguments.ranks = {2};
  arguments.rounds = 7;
  std::vector<std::string> layouts = {"dp", "zero", "tp"};
  int64_t megabytes = 1100;
  int steps = 10;
  std::string parent = ".";
  add_options(app, arguments, "TESSERA_CHECKPOINT_PEER");
  app.add_option("--layouts", layouts, "dp: replicas; zero: rows; tp: rows and columns by turns")
      ->delimiter(',')
      ->check(CLI::IsMember({"dp", "zero", "tp"}));
  app.add_option("--megabytes", megabytes, "size of the state")->check(CLI::PositiveNumber);
  app.add_option("--steps", steps, "of the optimizer, after an asynchronous save")->check(CLI::PositiveNumber);
  app.add_option("--folder", parent, "where states are saved, in a new folder")->check(CLI::ExistingDirectory);
  CLI11_PARSE(app, argc, argv);
  return run_main("checkpoint", [&] {
    if (!arguments.rank_at.empty()) return serve_checkpoint(arguments.rank_at), true;
    check_arguments(arguments);
    if (arguments.quick) {
      megabytes = 26;
      arguments.rounds = 2;
      steps = 2;
    }
    return run(arguments, layouts, megabytes, steps, std::filesystem::absolute(parent).string());
  });
}
