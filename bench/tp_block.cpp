// Measures a step of a transformer block on tensor-parallel ranks: by styles and by layers, beside one written by hand
// with c10d's own calls and beside PyTorch's parallelize_module.

#include <cmath>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/block.h"
#include "tessera/bench/measure.h"
#include "tessera/bench/paired.h"
#include "tessera/bench/tp_block_rank.h"
#include "tessera/bench/two_sides.h"

namespace {

using namespace tessera::bench;

constexpr double kTolerance = 1e-4;  // relative to the sum of magnitudes: float32 sums in different orders

struct TpBlockRow {
  int64_t ranks = 0;
  BlockSize size;
  std::map<std::string, double> microseconds;  // medians
  std::map<std::string, Ratio> to_hand;        // ours over the one by hand
  std::map<std::string, Ratio> from_peer;      // PyTorch over ours

  std::string name() const { return fmt::format("{} ranks, hidden {}", ranks, size.hidden); }
};

std::vector<double> numbers_in(const std::string& text) {
  std::istringstream in(text);
  std::vector<double> out;
  for (std::string each; in >> each;) out.push_back(std::stod(each));  // also "nan", which is like nothing
  return out;
}

// Throws std::runtime_error unless the sums differ by rounding only. `mine` and `hand` alternate sums and magnitudes.
void check_alike(const std::string& way, std::size_t rank, const std::string& mine, const std::string& hand) {
  const std::vector<double> a = numbers_in(mine), b = numbers_in(hand);
  bool alike = a.size() == b.size() && a.size() >= 2;
  for (std::size_t i = 0; alike && i + 1 < b.size(); i += 2) alike = std::abs(a[i] - b[i]) <= kTolerance * b[i + 1];
  if (!alike) {
    throw std::runtime_error(fmt::format(
        "on rank {} {} gives {}, the one by hand {}: they are not steps of the same block", rank, way, mine, hand));
  }
}

void check_all_alike(TwoSides& sides) {
  const std::vector<std::string> hand = sides.ours.ask("digest hand");
  for (const std::string way : {"styles", "layers", "peer"}) {
    const std::vector<std::string> answers = (way == "peer" ? sides.peer : sides.ours).ask("digest " + way);
    for (std::size_t rank = 0; rank < hand.size(); ++rank) check_alike(way, rank, answers[rank], hand[rank]);
  }
}

TpBlockRow measure(int64_t ranks, const BlockSize& size, TwoSides& sides, const SidesArguments& arguments) {
  sides.ours.ask("case " + size.text());
  sides.peer.ask("case " + size.text());
  check_all_alike(sides);
  auto times = interleaved(sides, {{"hand"}, {"styles"}, {"layers"}, {"peer", true}}, arguments);
  TpBlockRow row{.ranks = ranks, .size = size};
  for (const auto& [way, each] : times) row.microseconds[way] = figure_of(each).median;
  for (const std::string way : {"styles", "layers"}) {
    row.to_hand[way] = ratio_of(times[way], times["hand"]);
    row.from_peer[way] = ratio_of(times["peer"], times[way]);
  }
  return row;
}

void print_row(const TpBlockRow& row) {
  fmt::print("{:<24}", row.name());
  for (const char* way : {"hand", "styles", "layers", "peer"}) fmt::print("{:>10.0f}", row.microseconds.at(way));
  for (const char* way : {"styles", "layers"}) fmt::print("{:>24}", to_string(row.to_hand.at(way)));
  for (const char* way : {"styles", "layers"}) fmt::print("{:>24}", to_string(row.from_peer.at(way)));
  fmt::print("\n");
  std::fflush(stdout);
}

std::vector<Goal> goals_of(const std::vector<TpBlockRow>& rows, const std::string& backend) {
  std::vector<Goal> out;
  for (const TpBlockRow& row : rows) {
    const double most = row.ranks <= 2 ? 1.03 : 1.10;
    const double least = backend == "mpi" ? 1.3 : 1.0;
    for (const std::string way : {"styles", "layers"}) {
      const Ratio &to_hand = row.to_hand.at(way), &from_peer = row.from_peer.at(way);
      out.push_back({fmt::format("{}, {} / by hand: at most {:.2f}: {}", row.name(), way, most, to_string(to_hand)),
                     to_hand.median <= most});
      out.push_back({fmt::format("{}, PyTorch / {}: above {:.1f}: {}", row.name(), way, least, to_string(from_peer)),
                     from_peer.median > least});
    }
  }
  return out;
}

nlohmann::json json_of(const TpBlockRow& row) {
  nlohmann::json out = {{"name", row.name()}, {"ranks", row.ranks}, {"hidden", row.size.hidden}};
  for (const auto& [way, time] : row.microseconds) out[way + "_us"] = time;
  for (const auto& [way, ratio] : row.to_hand) put(out, way + "_to_hand", ratio);
  for (const auto& [way, ratio] : row.from_peer) put(out, "peer_to_" + way, ratio);
  return out;
}

bool run(const SidesArguments& arguments, const std::vector<int64_t>& hidden, const BlockSize& shape) {
  std::vector<TpBlockRow> rows;
  for (const int64_t ranks : arguments.ranks) {
    TwoSides sides(arguments, ranks);
    fmt::print("\n{} ranks over {}\n{:<24}{:>10}{:>10}{:>10}{:>10}{:>24}{:>24}{:>24}{:>24}\n", ranks, arguments.backend,
               "us a step", "by hand", "styles", "layers", "PyTorch", "styles/hand", "layers/hand", "PyTorch/styles",
               "PyTorch/layers");
    for (const int64_t each : hidden) {
      BlockSize size = shape;
      size.hidden = each;
      size.heads = std::max<int64_t>(ranks, each / 64);
      rows.push_back(measure(ranks, size, sides, arguments));
      print_row(rows.back());
    }
  }
  const bool met = print_goals(goals_of(rows, arguments.backend));
  if (!arguments.json.empty()) {
    nlohmann::json out = nlohmann::json::array();
    for (const TpBlockRow& row : rows) out.push_back(json_of(row));
    write_json(arguments.json, "tp_block", out);
  }
  return met || !arguments.check;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "A transformer block's step by styles and by layers, beside by hand and beside PyTorch's parallelize_module");
  SidesArguments arguments;
  arguments.round_ms = 100;
  std::vector<int64_t> hidden = {256, 512, 1024};
  BlockSize shape;
  add_options(app, arguments, "TESSERA_TP_BLOCK_PEER");
  app.add_option("--hidden", hidden, "features")->delimiter(',');
  app.add_option("--sequence", shape.sequence, "tokens of a sequence")->check(CLI::PositiveNumber);
  app.add_option("--batch", shape.batch, "sequences")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return run_main("tp_block", [&] {
    if (!arguments.rank_at.empty()) return serve_tp_block(arguments.rank_at), true;
    check_arguments(arguments);
    if (arguments.quick) {
      arguments.ranks = {2};
      hidden = {64};
      shape.sequence = 8;
      arguments.rounds = 2;
      arguments.round_ms = 1;
    }
    return run(arguments, hidden, shape);
  });
}
