// Measures the time per token of generation with a cache of keys and values: on ranks that cut the model, beside one
// process that runs the same model by LibTorch alone.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/generate_rank.h"
#include "tessera/bench/measure.h"
#include "tessera/bench/paired.h"
#include "tessera/bench/two_sides.h"

namespace {

using namespace tessera::bench;

struct GenerateRow {
  int64_t ranks = 0;
  int64_t hidden = 0;
  double ranks_us = 0;
  double plain_us = 0;
  Ratio to_plain;

  std::string name() const { return fmt::format("{} ranks, hidden {}", ranks, hidden); }
};

void check_alike(TwoSides& sides) {
  const std::string plain = sides.peer.ask("text plain").front();
  for (const std::string& text : sides.ours.ask("text ranks")) {
    if (text == plain) continue;
    throw std::runtime_error(fmt::format("a rank writes the tokens {}and one process writes {}", text, plain));
  }
}

GenerateRow measure(int64_t ranks, int64_t hidden, int64_t layers, int64_t sequence, TwoSides& sides,
                    const SidesArguments& arguments) {
  const std::string size = fmt::format("case {} {} {} {}", hidden, layers, std::max<int64_t>(4, hidden / 64), sequence);
  sides.ours.ask(size);
  sides.peer.ask(size);
  check_alike(sides);
  auto times = interleaved(sides, {{"ranks"}, {"plain", true}}, arguments);
  return {.ranks = ranks,
          .hidden = hidden,
          .ranks_us = figure_of(times["ranks"]).median,
          .plain_us = figure_of(times["plain"]).median,
          .to_plain = ratio_of(times["ranks"], times["plain"])};
}

void print_row(const GenerateRow& row) {
  fmt::print("{:<24}{:>10.0f}{:>14.0f}{:>24}\n", row.name(), row.ranks_us, row.plain_us, to_string(row.to_plain));
  std::fflush(stdout);
}

nlohmann::json json_of(const GenerateRow& row) {
  nlohmann::json out = {{"name", row.name()},
                        {"ranks", row.ranks},
                        {"hidden", row.hidden},
                        {"ranks_us", row.ranks_us},
                        {"plain_us", row.plain_us}};
  put(out, "to_plain", row.to_plain);
  return out;
}

bool run(const SidesArguments& arguments, const std::vector<int64_t>& hidden, int64_t layers, int64_t sequence) {
  nlohmann::json rows = nlohmann::json::array();
  fmt::print("{:<24}{:>10}{:>14}{:>24}\n", "us a token", "ranks", "one process", "ranks / one process");
  for (const int64_t ranks : arguments.ranks) {
    TwoSides sides(arguments, ranks);
    for (const int64_t each : hidden) {
      const GenerateRow row = measure(ranks, each, layers, sequence, sides, arguments);
      print_row(row);
      rows.push_back(json_of(row));
    }
  }
  if (!arguments.json.empty()) write_json(arguments.json, "generate", rows);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The time per token of generation on ranks, beside one process of LibTorch alone");
  SidesArguments arguments;
  arguments.ranks = {1, 2, 4};
  arguments.rounds = 21;
  std::vector<int64_t> hidden = {128, 512, 1024};
  int64_t layers = 4, sequence = 256;
  add_options(app, arguments);
  app.add_option("--hidden", hidden, "features")->delimiter(',');
  app.add_option("--layers", layers, "layers")->check(CLI::PositiveNumber);
  app.add_option("--sequence", sequence, "positions of the model")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return run_main("generate", [&] {
    if (!arguments.rank_at.empty()) return serve_generate(arguments.rank_at), true;
    check_arguments(arguments);
    if (arguments.quick) {
      arguments.ranks = {1, 2};
      hidden = {64};
      sequence = 16;
      arguments.rounds = 2;
      arguments.round_ms = 1;
    }
    return run(arguments, hidden, layers, sequence);
  });
}
