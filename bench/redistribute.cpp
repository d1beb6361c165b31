// How fast tensors are redistributed, beside PyTorch's DTensor over Gloo and beside raw c10d calls of the same plan: real
// processes, ours and the peer's measured in turn, one side at a time.

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "tessera/bench/ranks.h"
#include "tessera/bench/redistribute_cases.h"
#include "tessera/bench/redistribute_rank.h"
#include "tessera/bench/redistribute_report.h"

namespace {

using tessera::bench::Figure;
using tessera::bench::figure_of;
using tessera::bench::Ranks;
using tessera::bench::RedistributeCase;
using tessera::bench::RedistributeRow;

struct Arguments {
  std::vector<int64_t> ranks = {2, 4};
  std::vector<int64_t> sizes = {64, 256, 1024, 2048};
  std::string backend = "gloo";
  std::string only;
  std::string json;
  std::string launch;
  std::string peer_script;
  int rounds = 9;
  double round_ms = 30;
  bool quick = false;
  bool check = false;
};

// Of the ranks' answers to a case: elements and checksum of each rank's piece, and whether it communicates.
struct Result {
  std::vector<std::pair<int64_t, int64_t>> pieces;
  bool communicates = false;
  std::string refused;  // the peer's reason
};

Result result_of(const std::vector<std::string>& answers) {
  const std::string refused = "refused ";
  Result out;
  for (const std::string& answer : answers) {
    if (answer.starts_with(refused)) {
      out.refused = answer.substr(refused.size());
      continue;
    }
    std::istringstream in(answer);
    int64_t elements = 0, checksum = 0;
    int communicates = 0;
    if (!(in >> elements >> checksum)) throw std::runtime_error(fmt::format("\"{}\" is no answer to a case", answer));
    in >> communicates;  // ours say so
    out.pieces.emplace_back(elements, checksum);
    out.communicates |= communicates != 0;
  }
  if (!out.refused.empty() && !out.pieces.empty()) {
    throw std::runtime_error(
        fmt::format("{} of {} ranks refused: {}", answers.size() - out.pieces.size(), answers.size(), out.refused));
  }
  return out;
}

void check_alike(const RedistributeCase& wanted, const Result& ours, const Result& peer) {
  for (std::size_t rank = 0; rank < ours.pieces.size(); ++rank) {
    if (ours.pieces[rank] == peer.pieces[rank]) continue;
    throw std::runtime_error(fmt::format("{}: on rank {} ours has {} elements of checksum {}, the peer's {} of {}",
                                         wanted.text(), rank, ours.pieces[rank].first, ours.pieces[rank].second,
                                         peer.pieces[rank].first, peer.pieces[rank].second));
  }
}

double slowest(Ranks& ranks, const char* what, int calls) {
  double out = 0;
  for (const std::string& answer : ranks.ask(fmt::format("{} {}", what, calls))) out = std::max(out, std::stod(answer));
  return out;
}

// So many that the slowest of the three takes `round_ms` or so.
int calls_for(double microseconds, double round_ms) {
  return static_cast<int>(std::clamp(round_ms * 1000 / std::max(microseconds, 1.0), 2.0, 100.0));
}

RedistributeRow measure(const RedistributeCase& wanted, Ranks& ours, Ranks& peer, const Arguments& arguments) {
  const Result mine = result_of(ours.ask("case " + wanted.text()));
  const Result theirs = result_of(peer.ask("case " + wanted.text()));
  RedistributeRow row{.of = wanted, .communicates = mine.communicates, .refused = theirs.refused};
  if (row.has_peer()) check_alike(wanted, mine, theirs);
  const auto ask_peer = [&](int calls) { return row.has_peer() ? slowest(peer, "ours", calls) : 0.0; };
  const double first = std::max({slowest(ours, "ours", 1), slowest(ours, "raw", 1), ask_peer(1)});
  const int calls = calls_for(first, arguments.round_ms);
  std::vector<double> a, b, c, peer_to_ours, ours_to_raw;
  for (int round = 0; round < arguments.rounds; ++round) {
    // In turn who comes first.
    if (round % 2 == 1) b.push_back(slowest(ours, "raw", calls));
    a.push_back(slowest(ours, "ours", calls));
    if (round % 2 == 0) b.push_back(slowest(ours, "raw", calls));
    c.push_back(ask_peer(calls));
    peer_to_ours.push_back(c.back() / a.back());
    ours_to_raw.push_back(a.back() / b.back());
  }
  row.ours = figure_of(a);
  row.raw = figure_of(b);
  row.peer = figure_of(c);
  row.peer_to_ours = figure_of(peer_to_ours).median;
  row.ours_to_raw = figure_of(ours_to_raw).median;
  return row;
}

std::string own_path() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

std::vector<RedistributeRow> measure_on(int64_t size, const Arguments& arguments) {
  const auto started_by = [&](const std::string& backend, const std::vector<std::string>& command) {
    std::vector<std::string> out = {arguments.launch, "--no-prefix", "-n", std::to_string(size), "--backend", backend};
    out.insert(out.end(), command.begin(), command.end());
    return out;
  };
  const char* python = std::getenv("TESSERA_PYTHON");
  Ranks ours("ours", started_by(arguments.backend, {own_path(), "--rank-at"}), size);
  Ranks peer("peer", started_by("gloo", {python != nullptr ? python : "python3", arguments.peer_script}), size);
  fmt::print("\n{} ranks over {}\n{:<52}{:>11}{:>11}{:>11}{:>9}{:>9}\n", size, arguments.backend, "us a call", "ours", "raw",
             "peer", "peer/ours", "ours/raw");
  std::vector<RedistributeRow> rows;
  for (const RedistributeCase& each : tessera::bench::redistribute_cases(size, arguments.sizes)) {
    if (!arguments.only.empty() && each.text().find(arguments.only) == std::string::npos) continue;
    rows.push_back(measure(each, ours, peer, arguments));
    tessera::bench::print_row(rows.back());
  }
  return rows;
}

// Whether it may be called a success.
bool run(const Arguments& arguments) {
  std::vector<RedistributeRow> rows;
  for (const int64_t size : arguments.ranks) {
    const std::vector<RedistributeRow> more = measure_on(size, arguments);
    tessera::bench::print_summary(more);
    rows.insert(rows.end(), more.begin(), more.end());
  }
  if (arguments.ranks.size() > 1) {
    fmt::print("\nall numbers of ranks");
    tessera::bench::print_summary(rows);
  }
  const bool met = tessera::bench::print_goals(tessera::bench::goals_of(arguments.backend, rows));
  if (!arguments.json.empty()) tessera::bench::write_redistribute_json(arguments.json, arguments.backend, rows);
  return met || !arguments.check;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("How fast tensors are redistributed, beside PyTorch's DTensor and beside raw c10d calls");
  Arguments arguments;
  std::string rank_at;
  app.add_option("--ranks", arguments.ranks, "numbers of ranks, each in its turn")->delimiter(',');
  app.add_option("--backend", arguments.backend, "what carries ours; the peer has Gloo")
      ->check(CLI::IsMember({"gloo", "mpi"}));
  app.add_option("--sizes", arguments.sizes, "n: tensors of n x n, and of n-1 x n+1")->delimiter(',');
  app.add_option("--rounds", arguments.rounds, "interleaved rounds")->check(CLI::PositiveNumber);
  app.add_option("--round-ms", arguments.round_ms, "how long one measurement takes, or two calls")
      ->check(CLI::PositiveNumber);
  app.add_option("--only", arguments.only, "measure only rows that have this in their names");
  app.add_option("--json", arguments.json, "write the figures there too");
  app.add_flag("--check", arguments.check, "fail where a goal is missed");
  app.add_flag("--quick", arguments.quick, "2 ranks, small sizes, few rounds: whether it runs at all");
  app.add_option("--launch", arguments.launch, "the launcher's program")->envname("TESSERA_LAUNCH");
  app.add_option("--peer", arguments.peer_script, "the peer's program")->envname("TESSERA_REDISTRIBUTE_PEER");
  app.add_option("--rank-at", rank_at, "be a rank that is told what to do at this socket")->group("");
  CLI11_PARSE(app, argc, argv);
  try {
    if (!rank_at.empty()) {
      tessera::bench::serve_redistribute(rank_at);
      return 0;
    }
    if (arguments.launch.empty() || arguments.peer_script.empty()) {
      throw std::invalid_argument("--launch and --peer are needed; tools/bench redistribute gives them");
    }
    if (arguments.quick) {
      arguments.ranks = {2};
      arguments.sizes = {8};
      arguments.rounds = 2;
      arguments.round_ms = 1;
    }
    return run(arguments) ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "redistribute: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
