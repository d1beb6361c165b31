// Measures what a mesh of 4,096 ranks costs one of them: 64 x 8 x 8 in a fake world.

#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/measure.h"
#include "tessera/mesh/device_mesh.h"

namespace {

using tessera::DeviceMesh;

struct Timed {
  std::string name;
  tessera::bench::Figure figure;
};

Timed show(const std::string& name, const std::function<void()>& body, int calls) {
  std::vector<double> rounds;
  for (int round = 0; round < 20; ++round) rounds.push_back(tessera::bench::time_calls(body, calls));
  const tessera::bench::Figure figure = tessera::bench::figure_of(rounds);
  fmt::print("{:<40} {:>10.3f} us  ({:.3f} to {:.3f})\n", name, figure.median, figure.low, figure.high);
  return {name, figure};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What a mesh of 4,096 ranks costs one of them");
  std::string json;
  bool check = false;
  app.add_option("--json", json, "write the figures to this file too");
  app.add_flag("--check", check, "fail when a goal is missed");
  CLI11_PARSE(app, argc, argv);
  const auto world = tessera::World::fake(1234, 4096);
  const auto build = [&] { return tessera::init_device_mesh("cpu", {64, 8, 8}, {"dp", "pp", "tp"}, world); };
  std::vector<Timed> rows;
  const auto time = [&](const char* name, int calls, const std::function<void()>& body) {
    rows.push_back(show(name, body, calls));
  };
  time("build", 20, [&] { build(); });
  const DeviceMesh mesh = build();
  const std::vector<int64_t> dims = {0, 2};
  time("build again, while the first lives", 20, [&] { build(); });
  time("slice: mesh[\"tp\"]", 100, [&] { mesh["tp"]; });
  time("merged({0, 2}), again", 10000, [&] { mesh.merged(dims); });
  time("coordinate_of", 10000, [&] { mesh.mesh().coordinate_of(4000); });
  const std::size_t groups = world->group_count();
  const double built = rows[0].figure.median;
  const bool met = tessera::bench::print_goals({{fmt::format("build: under 1000 us: {:.0f}", built), built < 1000},
                                                {fmt::format("process groups made: 0: {}", groups), groups == 0}});
  if (!json.empty()) {
    nlohmann::json out = nlohmann::json::array();
    for (const Timed& row : rows) {
      out.push_back({{"name", row.name},
                     {"ours_us", row.figure.median},
                     {"ours_quartiles_us", {row.figure.low, row.figure.high}}});
    }
    tessera::bench::write_json(json, "mesh", out);
  }
  return check && !met ? 1 : 0;
}
