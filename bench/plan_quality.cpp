// Measures how good plans are: ours beside the optimum that an exhaustive search finds, beside the bytes that every
// plan needs, and beside PyTorch's own planner for the same pairs; and how long planning takes. It uses no processes
// and no tensors, so that all figures except the times are the same on every machine. It fails when a plan is not the
// best.

#include <algorithm>
#include <cstdlib>
#include <iostream>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/measure.h"
#include "tessera/bench/plan_large.h"
#include "tessera/bench/plan_optimum.h"
#include "tessera/bench/plan_pairs.h"
#include "tessera/bench/plan_peer.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"

namespace {

using namespace tessera;
using namespace tessera::bench;

// ---- planning time ------------------------------------------------------------------------------------------------

struct PlanningTime {
  std::string mesh, model;
  Figure figure;
  double worst = 0;
  int64_t mesh_ndim = 0;
};

std::vector<PlanningTime> time_planning(const Mesh& mesh, const Sizes& shape, std::size_t count) {
  std::vector<PlanningTime> out;
  const auto all = layouts(mesh, shape, [](int64_t) { return plain_choices(); });
  for (const NamedModel& by : models(mesh)) {
    std::vector<double> samples;
    for (const auto& [from, to] : pairs(all, count, 3)) {  // each pair once, so that no cache helps
      const double start = processor_microseconds();
      plan_redistribute(shape, at::kFloat, mesh, from, to, by.model);
      samples.push_back(processor_microseconds() - start);
    }
    const double worst = *std::max_element(samples.begin(), samples.end());
    out.push_back({mesh.to_string(), by.name, figure_of(std::move(samples)), worst, mesh.ndim()});
  }
  return out;
}

// ---- output -------------------------------------------------------------------------------------------------------

struct Results {
  std::vector<Quality> quality;
  std::vector<Comparison> comparison;
  std::vector<PlanningTime> times;
  std::vector<LargeMesh> large;
};

void print(const Results& results) {
  fmt::print(
      "## Plans beside the optimum\n\n| mesh | tensor | model | pairs | off | time, geomean | worst | cost for nothing "
      "|"
      " bytes/bound, worst | live bytes, geomean | worst | above the limit "
      "|\n|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Quality& q : results.quality) {
    fmt::print("| {} | {} | {} | {} | {} | {:.3f} | {:.2f} | {} | {} | {:.3f} | {:.2f} | {} |\n", q.mesh, q.shape,
               q.model, q.pairs, q.off, q.to_optimum.geomean(), q.to_optimum.worst(), q.to_optimum.for_nothing(),
               q.model == "bytes_only" ? fmt::format("{:.2f}", q.to_bound.worst()) : "", q.peak_to_optimum.geomean(),
               q.peak_to_optimum.worst(), q.above_limit);
  }
  if (!results.comparison.empty()) {
    fmt::print(
        "\n## PyTorch's planner beside ours: bytes\n\n| mesh | tensor | pairs | it does not support | it goes wrong |"
        " counted, geomean | worst | it moves for nothing | at its least, geomean | worst | it moves for nothing |"
        " steps, its / ours |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  }
  for (const Comparison& c : results.comparison) {
    const Ratios &counted = c.peer_to_ours, &least = c.peer_least_to_ours;
    fmt::print("| {} | {} | {} | {} | {} | {:.2f} | {:.2f} | {} | {:.2f} | {:.2f} | {} | {} / {} |\n", c.mesh, c.shape,
               c.pairs, c.unsupported, c.wrong, counted.geomean(), counted.worst(), counted.for_nothing(),
               least.geomean(), least.worst(), least.for_nothing(), c.peer_steps, c.our_steps);
  }
  if (!results.times.empty()) {
    fmt::print("\n## Planning time\n\n| mesh | model | median us | quartiles | worst |\n|---|---|---|---|---|\n");
  }
  for (const PlanningTime& t : results.times) {
    fmt::print("| {} | {} | {:.0f} | {:.0f}-{:.0f} | {:.0f} |\n", t.mesh, t.model, t.figure.median, t.figure.low,
               t.figure.high, t.worst);
  }
  if (!results.large.empty()) {
    fmt::print(
        "\n## Large meshes\n\n| mesh | tensor | model | pairs | cost us | MB | steps | planning, median us |"
        " quartiles | worst |\n|---|---|---|---|---|---|---|---|---|---|\n");
  }
  for (const LargeMesh& m : results.large) {
    fmt::print("| {} | {} | {} | {} | {:.0f} | {:.3f} | {} | {:.0f} | {:.0f}-{:.0f} | {:.0f} |\n", m.mesh, m.tensor,
               m.model, m.pairs, m.microseconds, m.bytes / 1e6, m.steps, m.planning.median, m.planning.low,
               m.planning.high, m.worst);
  }
}

// Returns one goal per mesh and model, for the median.
std::vector<bench::Goal> goals_of(const std::vector<PlanningTime>& times) {
  std::vector<bench::Goal> out;
  for (const PlanningTime& t : times) {
    const double most = t.mesh_ndim <= 3 ? 100 : 5000;
    out.push_back({fmt::format("planning on {} by {}: at most {} us in the median: {:.0f}", t.mesh, t.model, most,
                               t.figure.median),
                   t.figure.median <= most});
  }
  return out;
}

nlohmann::json json_of(const Ratios& ratios) {
  return {{"geomean", ratios.geomean()}, {"worst", ratios.worst()}, {"for_nothing", ratios.for_nothing()}};
}

void write_results(const std::string& path, const Results& results) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Quality& q : results.quality) {
    rows.push_back({{"name", fmt::format("optimum {} {} {}", q.mesh, q.shape, q.model)},
                    {"pairs", q.pairs},
                    {"off", q.off},
                    {"above_limit", q.above_limit},
                    {"to_optimum", json_of(q.to_optimum)},
                    {"peak_to_optimum", json_of(q.peak_to_optimum)}});
    if (q.model == "bytes_only") rows.back()["to_bound"] = json_of(q.to_bound);
    if (q.off) rows.back()["first_off"] = q.first_off;
  }
  for (const Comparison& c : results.comparison) {
    rows.push_back({{"name", fmt::format("peer {} {}", c.mesh, c.shape)},
                    {"pairs", c.pairs},
                    {"unsupported", c.unsupported},
                    {"wrong", c.wrong},
                    {"peer_bytes", c.peer_bytes},
                    {"peer_least_bytes", c.peer_least_bytes},
                    {"our_bytes", c.our_bytes},
                    {"peer_steps", c.peer_steps},
                    {"our_steps", c.our_steps},
                    {"peer_to_ours", json_of(c.peer_to_ours)},
                    {"peer_least_to_ours", json_of(c.peer_least_to_ours)}});
  }
  for (const PlanningTime& t : results.times) {
    rows.push_back({{"name", fmt::format("planning {} {}", t.mesh, t.model)},
                    {"ours_us", t.figure.median},
                    {"ours_quartiles_us", {t.figure.low, t.figure.high}},
                    {"worst_us", t.worst}});
  }
  for (const LargeMesh& m : results.large) {
    rows.push_back({{"name", fmt::format("large {} {} {}", m.mesh, m.tensor, m.model)},
                    {"pairs", m.pairs},
                    {"cost_us", m.microseconds},
                    {"bytes", m.bytes},
                    {"steps", m.steps},
                    {"ours_us", m.planning.median},
                    {"ours_quartiles_us", {m.planning.low, m.planning.high}},
                    {"worst_us", m.worst}});
  }
  bench::write_json(path, "plan_quality", rows);
}

// ---- measurement --------------------------------------------------------------------------------------------------

struct Setting {
  Sizes mesh, shape;
  std::size_t most = 0;  // at most this many pairs; 0: all
};

std::vector<Setting> settings(std::size_t pairs_3d, std::size_t pairs_64) {
  std::vector<Setting> out;
  for (const Sizes& shape : {Sizes{8, 12}, Sizes{5, 7}, Sizes{2, 1}}) {
    for (const Sizes& mesh : {Sizes{2}, Sizes{3}, Sizes{4}, Sizes{2, 2}, Sizes{2, 3}}) out.push_back({mesh, shape});
  }
  for (const Sizes& shape : {Sizes{8, 12}, Sizes{5, 7}}) out.push_back({{2, 2, 2}, shape, pairs_3d / 2});
  for (const Sizes& shape : {Sizes{16, 32}, Sizes{20, 9}}) out.push_back({{8, 8}, shape, pairs_64 / 2});
  return out;
}

Results measure(const std::vector<Setting>& settings, int examples, const std::string& peer, std::size_t timed,
                std::size_t large) {
  Results out;
  for (const auto& [mesh, shape, most] : settings) {
    for (Quality& quality : measure_quality(Mesh(mesh), shape, most, examples))
      out.quality.push_back(std::move(quality));
    if (!peer.empty()) out.comparison.push_back(compare_with_peer(Mesh(mesh), shape, most, peer));
  }
  if (timed > 0) {
    for (const Sizes& mesh : {Sizes{2, 2, 2}, Sizes{64, 8, 8}, Sizes{2, 2, 2, 2, 2}}) {
      for (PlanningTime& time : time_planning(Mesh(mesh), {4096, 8192}, timed)) out.times.push_back(std::move(time));
    }
  }
  if (large > 0) out.large = plan_on_large_meshes(large);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Plans beside the optimum, beside PyTorch's, and the time that planning takes");
  std::string json, peer_script;
  std::size_t pairs_3d = 20000, pairs_64 = 2000, timed = 301, large = 30;
  int examples = 0;
  bool time_only = false, check = false;
  app.add_option("--json", json, "write the figures to this file too");
  app.add_option("--peer", peer_script, "program that runs PyTorch's planner; without it only ours is measured")
      ->envname("TESSERA_PLAN_QUALITY_PEER");
  app.add_option("--pairs-3d", pairs_3d, "pairs on a mesh of (2, 2, 2)")->check(CLI::PositiveNumber);
  app.add_option("--pairs-64", pairs_64, "pairs on a mesh of (8, 8)")->check(CLI::PositiveNumber);
  app.add_option("--timed", timed, "pairs whose planning is timed, per mesh and model; 0: none");
  app.add_option("--large", large, "pairs planned per large mesh, tensor and model; 0: none");
  app.add_flag("--check", check, "fail when planning takes longer than its goal");
  app.add_flag("--time-only", time_only, "only the time that planning takes, and large meshes");
  app.add_option("--examples", examples, "show so many plans that are off, per mesh, tensor and model");
  CLI11_PARSE(app, argc, argv);
  const char* python = std::getenv("TESSERA_PYTHON");
  try {
    const std::string peer = peer_script.empty() ? "" : fmt::format("{} {}", python ? python : "python3", peer_script);
    const Results results =
        measure(time_only ? std::vector<Setting>() : settings(pairs_3d, pairs_64), examples, peer, timed, large);
    print(results);
    if (!json.empty()) write_results(json, results);
    const bool met = bench::print_goals(goals_of(results.times));
    int64_t off = 0;
    for (const Quality& quality : results.quality) off += quality.off;
    if (off) fmt::print("\n{} plans are off; --examples 5 shows some\n", off);
    return off || (check && !met) ? 1 : 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
