// Measures how fast tensors are redistributed, beside PyTorch's DTensor over Gloo and beside raw c10d calls of the same
// plan. It uses real processes and measures ours and the peer's in turn, one side at a time.

#include <algorithm>
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
#include "tessera/bench/two_sides.h"

namespace {

using tessera::bench::Figure;
using tessera::bench::figure_of;
using tessera::bench::Ranks;
using tessera::bench::RedistributeCase;
using tessera::bench::RedistributeRow;
using tessera::bench::SidesArguments;
using tessera::bench::slowest;
using tessera::bench::TwoSides;

struct Arguments : SidesArguments {
  Arguments() { rounds = 9; }
  std::vector<int64_t> sizes = {64, 256, 1024, 2048};
  std::string only;
};

// Holds the ranks' answers to a case: elements and checksum of each rank's piece, and whether the case communicates.
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
    in >> communicates;  // only our ranks answer this
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

double timed(Ranks& ranks, const char* what, int calls) { return slowest(ranks, fmt::format("{} {}", what, calls)); }

// Returns how many calls take about `round_ms`, where a call takes `microseconds`.
int calls_for(double microseconds, double round_ms) {
  return static_cast<int>(std::clamp(round_ms * 1000 / std::max(microseconds, 1.0), 2.0, 100.0));
}

RedistributeRow measure(const RedistributeCase& wanted, Ranks& ours, Ranks& peer, const Arguments& arguments) {
  const Result mine = result_of(ours.ask("case " + wanted.text()));
  const Result theirs = result_of(peer.ask("case " + wanted.text()));
  RedistributeRow row{.of = wanted, .communicates = mine.communicates, .refused = theirs.refused};
  if (row.has_peer()) check_alike(wanted, mine, theirs);
  const auto ask_peer = [&](int calls) { return row.has_peer() ? timed(peer, "ours", calls) : 0.0; };
  const double first = std::max({timed(ours, "ours", 1), timed(ours, "raw", 1), ask_peer(1)});
  const int calls = calls_for(first, arguments.round_ms);
  std::vector<double> a, b, c, peer_to_ours, ours_to_raw;
  for (int round = 0; round < arguments.rounds; ++round) {
    // Ours and raw take turns to be first.
    if (round % 2 == 1) b.push_back(timed(ours, "raw", calls));
    a.push_back(timed(ours, "ours", calls));
    if (round % 2 == 0) b.push_back(timed(ours, "raw", calls));
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

std::vector<RedistributeRow> measure_on(int64_t size, const Arguments& arguments) {
  TwoSides sides(arguments, size);
  fmt::print("\n{} ranks over {}\n{:<52}{:>11}{:>11}{:>11}{:>9}{:>9}\n", size, arguments.backend, "us per call", "ours",
             "raw", "peer", "peer/ours", "ours/raw");
  std::vector<RedistributeRow> rows;
  for (const RedistributeCase& each : tessera::bench::redistribute_cases(size, arguments.sizes)) {
    if (!arguments.only.empty() && each.text().find(arguments.only) == std::string::npos) continue;
    rows.push_back(measure(each, sides.ours, sides.peer, arguments));
    tessera::bench::print_row(rows.back());
  }
  return rows;
}

// Returns whether the program succeeds: every goal is met, or --check is not given.
bool run(const Arguments& arguments) {
  std::vector<RedistributeRow> rows;
  for (const int64_t size : arguments.ranks) {
    const std::vector<RedistributeRow> more = measure_on(size, arguments);
    tessera::bench::print_summary(more);
    rows.insert(rows.end(), more.begin(), more.end());
  }
  if (rows.empty()) throw std::invalid_argument(fmt::format("--only {}: there is no such row", arguments.only));
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
  tessera::bench::add_options(app, arguments, "TESSERA_REDISTRIBUTE_PEER");
  app.add_option("--sizes", arguments.sizes, "n: tensors of n x n, and of n-1 x n+1")->delimiter(',');
  app.add_option("--only", arguments.only, "measure only rows whose names contain this");
  CLI11_PARSE(app, argc, argv);
  return tessera::bench::run_main("redistribute", [&] {
    if (!arguments.rank_at.empty()) return tessera::bench::serve_redistribute(arguments.rank_at), true;
    check_arguments(arguments);
    if (arguments.quick) {
      arguments.ranks = {2};
      arguments.sizes = {8};
      arguments.rounds = 2;
      arguments.round_ms = 1;
    }
    return run(arguments);
  });
}
