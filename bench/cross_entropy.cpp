// Measures time and memory of cross entropy of logits that are sharded along their classes: ours beside PyTorch's
// loss_parallel and beside gathering the logits.

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/cross_entropy_rank.h"
#include "tessera/bench/measure.h"
#include "tessera/bench/paired.h"
#include "tessera/bench/two_sides.h"

namespace {

using namespace tessera::bench;

const std::vector<Variant> kVariants = {{"ours"}, {"gather"}, {"peer", true}};
constexpr double kMostOfBound = 1.05;

struct LossRow {
  int64_t ranks = 0;
  int64_t classes = 0;
  std::string dtype;
  double bound = 0;                            // bytes of the shard and a buffer of its size
  std::map<std::string, double> peak;          // bytes of the rank with most
  std::map<std::string, double> microseconds;  // medians
  Ratio from_peer, from_gather;                // PyTorch's time and gathering's time over ours

  std::string name() const { return fmt::format("{} ranks, {} classes, {}", ranks, classes, dtype); }
  double of_bound(const std::string& variant) const { return peak.at(variant) / bound; }
};

double most_of(const std::vector<std::string>& answers) {
  double out = 0;
  for (const std::string& each : answers) out = std::max(out, std::stod(each));
  return out;
}

Ranks& side_of(TwoSides& sides, const Variant& variant) { return variant.peer ? sides.peer : sides.ours; }

// Throws std::runtime_error unless losses and sums of the gradient differ by rounding only. An answer is LOSS SUM
// MAGNITUDE.
void check_alike(TwoSides& sides, const std::string& dtype) {
  const double tolerance = dtype == "float32" ? 1e-4 : 2e-2;
  const std::vector<std::string> ours = sides.ours.ask("digest ours");
  for (const Variant& variant : {kVariants[1], kVariants[2]}) {
    const std::vector<std::string> answers = side_of(sides, variant).ask("digest " + variant.name);
    for (std::size_t rank = 0; rank < ours.size(); ++rank) {
      double loss = 0, sum = 0, magnitude = 0, loss_of_ours = 0, sum_of_ours = 0;
      const bool are_there = (std::istringstream(answers[rank]) >> loss >> sum >> magnitude) &&
                             (std::istringstream(ours[rank]) >> loss_of_ours >> sum_of_ours);
      if (are_there && std::abs(loss - loss_of_ours) <= tolerance * std::abs(loss) &&
          std::abs(sum - sum_of_ours) <= tolerance * magnitude) {
        continue;
      }
      throw std::runtime_error(
          fmt::format("on rank {} {} gives {}, ours {}: loss and gradient are not those of the same logits", rank,
                      variant.name, answers[rank], ours[rank]));
    }
  }
}

LossRow measure(int64_t ranks, int64_t classes, const std::string& dtype, int64_t tokens, TwoSides& sides,
                const SidesArguments& arguments) {
  LossRow row{.ranks = ranks, .classes = classes, .dtype = dtype};
  const std::string text = fmt::format("case {} {} {}", dtype, tokens, classes);
  row.bound = 2 * most_of(sides.ours.ask(text));
  sides.peer.ask(text);
  check_alike(sides, dtype);
  for (const Variant& variant : kVariants)
    row.peak[variant.name] = most_of(side_of(sides, variant).ask("peak " + variant.name));
  auto times = interleaved(sides, kVariants, arguments);
  for (const auto& [variant, each] : times) row.microseconds[variant] = figure_of(each).median;
  row.from_peer = ratio_of(times["peer"], times["ours"]);
  row.from_gather = ratio_of(times["gather"], times["ours"]);
  return row;
}

void print_heading(int64_t ranks, const std::string& backend) {
  fmt::print("\n{} ranks over {}\n{:<36}", ranks, backend, "ms per step, and peak / bound");
  for (const char* variant : {"ours", "gathering", "PyTorch"}) fmt::print("{:>11}{:>8}", variant, "");
  fmt::print("{:>24}{:>24}\n", "gathering/ours", "PyTorch/ours");
}

void print_row(const LossRow& row) {
  fmt::print("{:<36}", row.name());
  for (const Variant& variant : kVariants) {
    fmt::print("{:>11.1f}{:>8.3f}", row.microseconds.at(variant.name) / 1000, row.of_bound(variant.name));
  }
  fmt::print("{:>24}{:>24}\n", to_string(row.from_gather), to_string(row.from_peer));
  std::fflush(stdout);
}

std::vector<Goal> goals_of(const std::vector<LossRow>& rows) {
  std::vector<Goal> out;
  for (const LossRow& row : rows) {
    const double of_bound = row.of_bound("ours");
    out.push_back({fmt::format("{}: peak over the shard and a buffer of its size: at most {}: {:.3f}", row.name(),
                               kMostOfBound, of_bound),
                   of_bound <= kMostOfBound});
  }
  return out;
}

nlohmann::json json_of(const LossRow& row) {
  nlohmann::json out = {{"name", row.name()}, {"ranks", row.ranks},       {"classes", row.classes},
                        {"dtype", row.dtype}, {"bound_bytes", row.bound}, {"of_bound", row.of_bound("ours")}};
  for (const auto& [variant, bytes] : row.peak) out[variant + "_peak_bytes"] = bytes;
  for (const auto& [variant, time] : row.microseconds) out[variant + "_us"] = time;
  put(out, "peer_to_ours", row.from_peer);
  put(out, "gather_to_ours", row.from_gather);
  return out;
}

bool run(const SidesArguments& arguments, const std::vector<int64_t>& classes, const std::vector<std::string>& dtypes,
         int64_t tokens) {
  std::vector<LossRow> rows;
  for (const int64_t ranks : arguments.ranks) {
    TwoSides sides(arguments, ranks);
    print_heading(ranks, arguments.backend);
    for (const std::string& dtype : dtypes) {
      for (const int64_t each : classes) {
        rows.push_back(measure(ranks, each, dtype, tokens, sides, arguments));
        print_row(rows.back());
      }
    }
  }
  const bool met = print_goals(goals_of(rows));
  if (!arguments.json.empty()) {
    nlohmann::json out = nlohmann::json::array();
    for (const LossRow& row : rows) out.push_back(json_of(row));
    write_json(arguments.json, "cross_entropy", out);
  }
  return met || !arguments.check;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Cross entropy of logits sharded along their classes, beside PyTorch's loss_parallel and beside gathering: time "
      "and "
      "memory");
  SidesArguments arguments;
  arguments.ranks = {1, 2, 4};
  std::vector<int64_t> classes = {32768, 65536, 131072};
  std::vector<std::string> dtypes = {"float32", "bfloat16"};
  int64_t tokens = 256;
  add_options(app, arguments, "TESSERA_CROSS_ENTROPY_PEER");
  app.add_option("--classes", classes, "sizes of the vocabulary")->delimiter(',');
  app.add_option("--dtypes", dtypes, "of the logits")->delimiter(',')->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--tokens", tokens, "rows of the logits")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return run_main("cross_entropy", [&] {
    if (!arguments.rank_at.empty()) return serve_cross_entropy(arguments.rank_at), true;
    check_arguments(arguments);
    if (arguments.quick) {
      arguments.ranks = {2};
      classes = {32768};
      arguments.rounds = 2;
      arguments.round_ms = 1;
    }
    return run(arguments, classes, dtypes, tokens);
  });
}
