// Measures whole training steps of a transformer: ours, beside one written by hand with c10d's own collectives and
// beside PyTorch's DistributedDataParallel, parallelize_module and fully_shard.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/measure.h"
#include "tessera/bench/paired.h"
#include "tessera/bench/train_case.h"
#include "tessera/bench/train_rank.h"
#include "tessera/bench/two_sides.h"

namespace {

using namespace tessera::bench;

// These are relative: float32 sums in different orders. LibTorch's norm of three million floats is off by 6e-5.
constexpr double kTolerance = 1e-4;
constexpr double kNormTolerance = 1e-3;
constexpr int kComparedSteps = 2;  // AdamW divides small gradients by their size, so roundings grow with each

struct TrainRow {
  TrainCase size;
  std::map<std::string, double> microseconds;  // medians
  Ratio to_hand;                               // ours over the one by hand
  Ratio from_peer;                             // PyTorch over ours

  double tokens_per_second(const std::string& way) const {
    return static_cast<double>(size.batch * size.sequence) / microseconds.at(way) * 1e6;
  }
  bool has_pieces() const { return size.tp > 1 || size.zero > 0; }
};

// Returns loss and norm of the gradients of each step.
std::vector<double> losses_and_norms(Ranks& ranks, const std::string& way) {
  std::istringstream in(ranks.ask(fmt::format("losses {} {}", way, kComparedSteps)).at(0));
  std::vector<double> out;
  for (double each = 0; in >> each;) out.push_back(each);
  return out;
}

// Throws std::runtime_error unless all ways have the same losses and norms of gradients.
void check_alike(const TrainCase& size, TwoSides& sides) {
  const std::vector<double> hand = losses_and_norms(sides.ours, "hand");
  for (const std::string way : {"ours", "peer"}) {
    const std::vector<double> mine = losses_and_norms(way == "peer" ? sides.peer : sides.ours, way);
    bool alike = hand.size() == 2 * kComparedSteps && mine.size() == hand.size();
    for (std::size_t i = 0; alike && i < hand.size(); ++i) {
      alike = std::abs(mine[i] - hand[i]) <= (i % 2 == 0 ? kTolerance : kNormTolerance) * std::abs(hand[i]);
    }
    if (!alike) {
      throw std::runtime_error(
          fmt::format("{}: {} has the losses and norms {}, the one by hand {}: they do not train the same", size.name(),
                      way, fmt::join(mine, " "), fmt::join(hand, " ")));
    }
  }
}

TrainRow measure(const TrainCase& size, TwoSides& sides, const SidesArguments& arguments) {
  sides.ours.ask("case " + size.text());
  sides.peer.ask("case " + size.text());
  check_alike(size, sides);
  auto times = interleaved(sides, {{"hand"}, {"ours"}, {"peer", true}}, arguments);
  TrainRow row{.size = size, .microseconds = {}, .to_hand = {}, .from_peer = {}};
  for (const auto& [way, each] : times) row.microseconds[way] = figure_of(each).median;
  row.to_hand = ratio_of(times["ours"], times["hand"]);
  row.from_peer = ratio_of(times["peer"], times["ours"]);
  return row;
}

void print_row(const TrainRow& row) {
  fmt::print("{:<28}", row.size.name());
  for (const char* way : {"hand", "ours", "peer"}) fmt::print("{:>10.0f}", row.tokens_per_second(way));
  fmt::print("{:>24}{:>24}\n", to_string(row.to_hand), to_string(row.from_peer));
  std::fflush(stdout);
}

std::vector<Goal> goals_of(const std::vector<TrainRow>& rows) {
  std::vector<Goal> out;
  double logarithms = 0;
  int pieces = 0;
  for (const TrainRow& row : rows) {
    const double least = row.has_pieces() ? 1.0 : 0.97;
    out.push_back({fmt::format("{}, ours / by hand: at most 1.03: {}", row.size.name(), to_string(row.to_hand)),
                   row.to_hand.median <= 1.03});
    out.push_back(
        {fmt::format("{}, PyTorch / ours: at least {:.2f}: {}", row.size.name(), least, to_string(row.from_peer)),
         row.from_peer.median >= least});
    if (!row.has_pieces()) continue;
    logarithms += std::log(row.from_peer.median);
    ++pieces;
  }
  if (pieces > 0) {
    const double mean = std::exp(logarithms / pieces);
    out.push_back(
        {fmt::format("PyTorch / ours, geometric mean of the rows with tp or zero: at least 1.30: {:.3f}", mean),
         mean >= 1.3});
  }
  return out;
}

nlohmann::json json_of(const TrainRow& row) {
  nlohmann::json out = {{"name", row.size.name()}, {"tokens", row.size.batch * row.size.sequence}};
  for (const auto& [way, time] : row.microseconds) out[way + "_us"] = time;
  put(out, "ours_to_hand", row.to_hand);
  put(out, "peer_to_ours", row.from_peer);
  return out;
}

struct MeshCut {
  int64_t dp, tp, zero;
};

// Each mesh has ranks of its own, since the ranks' number is part of it.
bool run(const SidesArguments& arguments, const std::vector<int64_t>& hidden, const TrainCase& shape,
         const std::string& only) {
  std::vector<TrainRow> rows;
  fmt::print("{:<28}{:>10}{:>10}{:>10}{:>24}{:>24}\n", "tokens/s", "by hand", "ours", "PyTorch", "ours/hand",
             "PyTorch/ours");
  for (const MeshCut& cut : {MeshCut{4, 1, 0}, MeshCut{1, 2, 0}, MeshCut{2, 2, 0}, MeshCut{4, 1, 3}}) {
    TrainCase size = shape;
    size.dp = cut.dp;
    size.tp = cut.tp;
    size.zero = cut.zero;
    if (!only.empty() && size.mesh_name() != only) continue;
    TwoSides sides(arguments, size.ranks());
    for (const int64_t each : hidden) {
      size.hidden = each;
      rows.push_back(measure(size, sides, arguments));
      print_row(rows.back());
    }
  }
  if (rows.empty()) throw std::invalid_argument(fmt::format("--only {}: there is no such mesh", only));
  const bool met = print_goals(goals_of(rows));
  if (!arguments.json.empty()) {
    nlohmann::json out = nlohmann::json::array();
    for (const TrainRow& row : rows) out.push_back(json_of(row));
    write_json(arguments.json, "train", out);
  }
  return met || !arguments.check;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Training steps of a transformer, beside by hand and beside PyTorch; the loss of each is the same");
  SidesArguments arguments;
  arguments.rounds = 11;
  arguments.round_ms = 2000;
  std::vector<int64_t> hidden = {256, 512};
  TrainCase shape;
  std::string only;
  add_options(app, arguments, "TESSERA_TRAIN_PEER");
  app.add_option("--only", only, "one mesh, such as \"dp=4\" or \"dp=4 zero\"");
  app.remove_option(app.get_option("--ranks"));
  app.add_option("--hidden", hidden, "features")->delimiter(',');
  app.add_option("--layers", shape.layers, "blocks of the model")->check(CLI::PositiveNumber);
  app.add_option("--sequence", shape.sequence, "tokens of a sequence")->check(CLI::PositiveNumber);
  app.add_option("--batch", shape.batch, "sequences in the batch of all ranks, a multiple of 4")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return run_main("train", [&] {
    if (!arguments.rank_at.empty()) return serve_train(arguments.rank_at), true;
    check_arguments(arguments);
    if (arguments.quick) {
      hidden = {32};
      shape.layers = 2;
      shape.sequence = 8;
      arguments.rounds = 2;
      arguments.round_ms = 1;
    }
    if (shape.batch % 4 != 0 || shape.sequence % 2 != 0 ||
        std::ranges::any_of(hidden, [&](int64_t each) { return each % shape.heads != 0; })) {
      throw std::invalid_argument(
          fmt::format("a batch of {}, sequences of {} tokens, hidden {}: the batch must be a multiple of 4, the "
                      "sequence of 2, and hidden of {}",
                      shape.batch, shape.sequence, fmt::join(hidden, ","), shape.heads));
    }
    return run(arguments, hidden, shape, only);
  });
}
