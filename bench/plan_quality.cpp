// How good plans are, by counting: ours beside the optimum that trying everything finds, beside the bytes that no plan can
// save, and beside PyTorch's own planner for the same pairs; and how long planning takes. No processes, no tensors: but for
// the times, the figures are the same on every machine. Fails when a plan is not the best.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/measure.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/plan.h"
#include "tessera/tests/placement/brute/brute_force.h"

namespace {

using namespace tessera;
using Pair = std::pair<Placements, Placements>;
using Sizes = std::vector<int64_t>;

struct NamedModel {
  std::string name;
  CostModel model;
};

// Links of which the first is the fastest or the slowest by so much.
CostModel graded(int64_t mesh_ndim, double microseconds, double bytes_per_microsecond, bool first_is_fastest) {
  CostModel out;
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    const auto grade = static_cast<double>(first_is_fastest ? i + 1 : mesh_ndim - i);
    out.links.push_back({microseconds * grade, bytes_per_microsecond / grade});
  }
  return out;
}

// The tensors here have some hundred bytes, so for the measured models latency is all. The made-up ones let bytes weigh as
// much as steps do, and alone.
std::vector<NamedModel> models(const Mesh& mesh) {
  const int64_t n = mesh.ndim();
  return {{"bytes_only", CostModel::bytes_only(n)},
          {"gloo", CostModel::gloo(n)},
          {"nvlink_infiniband 2", CostModel::nvlink_infiniband(mesh, 2)},
          {"nvlink_infiniband 4", CostModel::nvlink_infiniband(mesh, 4)},
          {"balanced", graded(n, 10, 10, true)},
          {"bandwidth", graded(n, 0.001, 10, false)}};
}

// ---- the pairs ------------------------------------------------------------------------------------------------------

std::vector<Placement> plain_choices() { return {Replicate(), Shard(0), Shard(1), Partial()}; }

// Every built-in placement that may fit `ranks` of a mesh dimension.
std::vector<Placement> choices(int64_t ranks, const Sizes& shape) {
  std::vector<Placement> out = plain_choices();
  out.push_back(Partial(ReduceOp::kMax));
  out.push_back(BlockCyclic(0, 2));
  Sizes ragged(static_cast<std::size_t>(ranks), 0);
  ragged.front() = shape[0] / 2;
  ragged.back() += shape[0] - shape[0] / 2;
  out.push_back(RaggedShard(0, ragged));
  std::vector<Intervals> lists(static_cast<std::size_t>(ranks));
  for (int64_t i = 0; i < shape[1]; ++i) append(lists[static_cast<std::size_t>((i * i + i / 2) % ranks)], {i, i + 1});
  out.push_back(IntervalShard(1, lists));
  out.push_back(Shard(0).ordered(1));
  out.push_back(Shard(1).ordered(1));
  return out;
}

// All combinations, one a mesh dimension, that are a layout.
std::vector<Placements> layouts(const Mesh& mesh, const Sizes& shape,
                                const std::function<std::vector<Placement>(int64_t)>& choices_of) {
  std::vector<Placements> all = {{}};
  for (const int64_t ranks : mesh.shape()) {
    std::vector<Placements> longer;
    for (const Placements& before : all) {
      for (const Placement& choice : choices_of(ranks)) {
        longer.push_back(before);
        longer.back().push_back(choice);
      }
    }
    all = std::move(longer);
  }
  std::map<std::string, Placements> out;
  for (const Placements& written : all) {
    try {
      const Placements placements = normalize(written, mesh, static_cast<int64_t>(shape.size()), "plan_quality");
      check_layout(placements, mesh, shape, "plan_quality");
      if (partials_commute(placements)) out.emplace(to_string(placements), placements);
    } catch (const std::invalid_argument&) {  // it does not fit
    }
  }
  std::vector<Placements> list;
  for (const auto& [text, placements] : out) list.push_back(placements);
  return list;
}

// All pairs, or `most` drawn by `seed`.
std::vector<Pair> pairs(const std::vector<Placements>& layouts, std::size_t most, uint64_t seed) {
  std::vector<Pair> out;
  if (most == 0 || layouts.size() * layouts.size() <= most) {
    for (const Placements& from : layouts) {
      for (const Placements& to : layouts) out.emplace_back(from, to);
    }
    return out;
  }
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < most; ++i) {
    const std::size_t from = random() % layouts.size();
    out.emplace_back(layouts[from], layouts[random() % layouts.size()]);
  }
  return out;
}

// ---- ratios ---------------------------------------------------------------------------------------------------------

// Of what a plan costs to what it could: where that is nothing, a plan that costs is counted apart.
class Ratios {
 public:
  void add(double cost, double least) {
    if (least <= 0) {
      for_nothing_ += cost > 0;
      return;
    }
    ++count_;
    sum_of_logs_ += std::log(std::max(cost / least, 1e-9));
    worst_ = std::max(worst_, cost / least);
  }
  double geomean() const { return count_ ? std::exp(sum_of_logs_ / static_cast<double>(count_)) : 1; }
  double worst() const { return worst_; }
  int64_t for_nothing() const { return for_nothing_; }
  nlohmann::json json() const { return {{"geomean", geomean()}, {"worst", worst_}, {"for_nothing", for_nothing_}}; }

 private:
  int64_t count_ = 0;
  int64_t for_nothing_ = 0;
  double sum_of_logs_ = 0;
  double worst_ = 1;
};

// ---- ours beside the optimum ------------------------------------------------------------------------------------------

struct Quality {
  std::string mesh, shape, model;
  int64_t pairs = 0;
  int64_t off = 0;          // dearer or cheaper than the optimum, unsound, or lower_bound() is not what counting gives
  int64_t above_limit = 0;  // of live bytes; the optimum is above it in as many
  Ratios to_optimum;
  Ratios to_bound;  // bytes to the lower bound, of pairs without a pending reduction
  std::string first_off;
};

// Whether the planned time may be called the optimum's: each step's bytes are a whole number in the plan.
bool equal(const Plan& plan, const CostModel& model, double microseconds) {
  double slack = 1e-6 + 1e-6 * microseconds;
  for (const PlanStep& step : plan.steps()) {
    if (step.max_bytes > 0) slack += 1 / model.over(step.mesh_dims).bytes_per_microsecond;
  }
  return std::abs(plan.microseconds() - microseconds) <= slack;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', '|');
  return text;
}

// What is wrong with our plan for one pair; "" when nothing is.
std::string judge(brute::BruteForce& optimum_of, const Sizes& shape, const Mesh& mesh, const Pair& pair,
                  const NamedModel& by, Quality& quality) {
  const auto& [from, to] = pair;
  const Plan plan = plan_redistribute(shape, at::kFloat, mesh, from, to, by.model);
  const brute::Optimum optimum = optimum_of.cheapest(from, to, by.model);
  const bool bytes_only = by.name == "bytes_only";
  quality.to_optimum.add(plan.microseconds(), optimum.microseconds);
  quality.above_limit += static_cast<double>(plan.peak_bytes()) > optimum_of.live_limit(from, to);

  const std::string plans = fmt::format("ours {}; best {}", one_line(plan.to_string()), brute::to_string(optimum));
  const std::string objection = optimum_of.objection(plan, from, to);
  if (!objection.empty()) return fmt::format("unsound: {}; {}", objection, plans);
  if (!equal(plan, by.model, optimum.microseconds)) {
    return fmt::format("{}: {}", plan.microseconds() > optimum.microseconds ? "dearer" : "cheaper", plans);
  }
  if (!bytes_only) return "";
  const LowerBound bound = lower_bound(shape, at::kFloat, mesh, from, to);
  if (any_partial(from) || any_partial(to)) {
    const bool sound = static_cast<double>(bound.max_bytes) <= optimum.microseconds + 1;
    return sound ? "" : fmt::format("lower_bound says {}: {}", bound.max_bytes, plans);
  }
  quality.to_bound.add(static_cast<double>(plan.max_bytes()), static_cast<double>(bound.max_bytes));
  const LowerBound counted = optimum_of.missing(from, to);
  if (bound.max_bytes != counted.max_bytes || bound.total_bytes != counted.total_bytes) {
    return fmt::format("lower_bound says {} and {}, counted are {} and {}", bound.max_bytes, bound.total_bytes,
                       counted.max_bytes, counted.total_bytes);
  }
  return plan.max_bytes() == bound.max_bytes ? "" : fmt::format("above the lower bound {}: {}", bound.max_bytes, plans);
}

std::vector<Quality> measure_quality(const Mesh& mesh, const Sizes& shape, std::size_t most, int examples) {
  const auto all = layouts(mesh, shape, [&](int64_t ranks) { return choices(ranks, shape); });
  brute::BruteForce optimum_of(shape, at::kFloat, mesh);
  std::vector<Quality> out;
  for (const NamedModel& by : models(mesh)) {
    out.push_back({.mesh = mesh.to_string(), .shape = fmt::format("{}x{}", shape[0], shape[1]), .model = by.name});
  }
  for (const Pair& pair : pairs(all, most, 1)) {
    std::size_t row = 0;
    for (const NamedModel& by : models(mesh)) {
      Quality& quality = out[row++];
      ++quality.pairs;
      std::string wrong;
      try {
        wrong = judge(optimum_of, shape, mesh, pair, by, quality);
      } catch (const std::exception& error) {
        wrong = fmt::format("threw: {}", error.what());
      }
      if (wrong.empty()) continue;
      wrong = fmt::format("{} -> {}: {}", to_string(pair.first), to_string(pair.second), wrong);
      if (quality.off++ < examples) {
        std::cerr << fmt::format("OFF mesh {} shape {} by {}: {}\n", quality.mesh, quality.shape, quality.model, wrong);
      }
      if (quality.first_off.empty()) quality.first_off = wrong;
    }
  }
  return out;
}

// ---- ours beside PyTorch's --------------------------------------------------------------------------------------------

struct Comparison {
  std::string mesh, shape;
  int64_t pairs = 0;
  int64_t unsupported = 0;  // PyTorch plans no way
  int64_t wrong = 0;        // a step of PyTorch's needs elements that its group does not hold (uneven nested shards)
  int64_t peer_steps = 0, our_steps = 0;  // that communicate, where both plan
  double peer_bytes = 0, our_bytes = 0;
  Ratios peer_to_ours;  // bytes received by the rank that receives most; ours by bytes_only
};

std::string peer_request(const Mesh& mesh, const Sizes& shape, const Pair& pair) {
  const auto words = [](const Placements& placements) {
    std::vector<std::string> out;
    for (const Placement& p : placements) out.push_back(to_string(p));
    return fmt::format("{}", fmt::join(out, " "));
  };
  return fmt::format("{};{};{};{}\n", fmt::join(mesh.shape(), ","), fmt::join(shape, ","), words(pair.first),
                     words(pair.second));
}

// One answer a request.
std::vector<std::string> ask_peer(const std::string& command, const std::string& requests) {
  const std::string path = fmt::format("/tmp/plan_quality_{}.txt", getpid());
  std::ofstream(path) << requests;
  FILE* const pipe = popen(fmt::format("{} < {}", command, path).c_str(), "r");
  if (!pipe) throw std::runtime_error(fmt::format("--peer: cannot start {}", command));
  std::string text;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) text += static_cast<char>(c);
  const int status = pclose(pipe);
  std::remove(path.c_str());
  std::vector<std::string> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) out.push_back(line);
  const auto asked = std::count(requests.begin(), requests.end(), '\n');
  if (status != 0 || static_cast<int64_t>(out.size()) != asked) {
    throw std::runtime_error(fmt::format("--peer: {} answers to {} requests, status {}", out.size(), asked, status));
  }
  return out;
}

// Follows "mesh dimension:placement" steps, each over one mesh dimension, priced as ours are. False when one cannot be.
bool follow(const std::string& answer, Placements now, brute::BruteForce& steps_of, double& bytes, int64_t& steps) {
  std::istringstream words(answer);
  for (std::string word; words >> word;) {
    const std::size_t colon = word.find(':');
    const auto mesh_dim = static_cast<std::size_t>(std::stoll(word.substr(0, colon)));
    Placements next = now;
    next[mesh_dim] = parse_placement(word.substr(colon + 1));
    std::optional<brute::Way> cheapest;  // the peer's reductions too are of the better kind
    for (const brute::Way& way : steps_of.ways(now, next)) {
      const bool along = (way.over & ~(brute::MeshDims{1} << mesh_dim)) == 0;
      if (along && (!cheapest || way.bytes < cheapest->bytes)) cheapest = way;
    }
    if (!cheapest) return false;
    bytes += cheapest->bytes;
    steps += cheapest->over != 0;
    now = std::move(next);
  }
  return true;
}

Comparison compare(const Mesh& mesh, const Sizes& shape, std::size_t most, const std::string& command) {
  Comparison out{.mesh = mesh.to_string(), .shape = fmt::format("{}x{}", shape[0], shape[1])};
  brute::BruteForce steps_of(shape, at::kFloat, mesh);
  const std::vector<Pair> asked = pairs(layouts(mesh, shape, [](int64_t) { return plain_choices(); }), most, 2);
  std::string requests;
  for (const Pair& pair : asked) requests += peer_request(mesh, shape, pair);
  const std::vector<std::string> answers = ask_peer(command, requests);
  for (std::size_t i = 0; i < asked.size(); ++i) {
    ++out.pairs;
    if (answers[i].starts_with("-")) {
      ++out.unsupported;
      continue;
    }
    double bytes = 0;
    int64_t steps = 0;
    if (!follow(answers[i], asked[i].first, steps_of, bytes, steps)) {
      ++out.wrong;
      continue;
    }
    const Plan plan =
        plan_redistribute(shape, at::kFloat, mesh, asked[i].first, asked[i].second, CostModel::bytes_only(mesh.ndim()));
    out.peer_bytes += bytes;
    out.our_bytes += static_cast<double>(plan.max_bytes());
    out.peer_steps += steps;
    for (const PlanStep& step : plan.steps()) out.our_steps += step.kind != PlanStep::Kind::kLocal;
    out.peer_to_ours.add(bytes, static_cast<double>(plan.max_bytes()));
  }
  return out;
}

// ---- the time of planning -----------------------------------------------------------------------------------------------

struct PlanningTime {
  std::string mesh, model;
  bench::Figure figure;
  double worst = 0;
};

std::vector<PlanningTime> time_planning(const Mesh& mesh, const Sizes& shape, std::size_t count) {
  std::vector<PlanningTime> out;
  const auto all = layouts(mesh, shape, [](int64_t) { return plain_choices(); });
  for (const NamedModel& by : models(mesh)) {
    std::vector<double> samples;
    for (const auto& [from, to] : pairs(all, count, 3)) {  // each once: nothing is there to be remembered
      samples.push_back(bench::time_calls(
          [&from = from, &to = to, &shape, &mesh, &by] { plan_redistribute(shape, at::kFloat, mesh, from, to, by.model); },
          1));
    }
    const double worst = *std::max_element(samples.begin(), samples.end());
    out.push_back({mesh.to_string(), by.name, bench::figure_of(std::move(samples)), worst});
  }
  return out;
}

// ---- what is written ----------------------------------------------------------------------------------------------------

struct Results {
  std::vector<Quality> quality;
  std::vector<Comparison> comparison;
  std::vector<PlanningTime> times;
};

void print(const Results& results) {
  fmt::print(
      "## Plans beside the optimum\n\n| mesh | tensor | model | pairs | off | geomean | worst | cost for nothing |"
      " bytes/bound, worst | above the memory limit |\n|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Quality& q : results.quality) {
    fmt::print("| {} | {} | {} | {} | {} | {:.3f} | {:.2f} | {} | {} | {} |\n", q.mesh, q.shape, q.model, q.pairs, q.off,
               q.to_optimum.geomean(), q.to_optimum.worst(), q.to_optimum.for_nothing(),
               q.model == "bytes_only" ? fmt::format("{:.2f}", q.to_bound.worst()) : "", q.above_limit);
  }
  if (!results.comparison.empty()) {
    fmt::print(
        "\n## PyTorch's planner beside ours: bytes\n\n| mesh | tensor | pairs | it does not support | it goes wrong |"
        " geomean | worst | it moves for nothing | steps, its / ours |\n|---|---|---|---|---|---|---|---|---|\n");
  }
  for (const Comparison& c : results.comparison) {
    fmt::print("| {} | {} | {} | {} | {} | {:.2f} | {:.2f} | {} | {} / {} |\n", c.mesh, c.shape, c.pairs, c.unsupported,
               c.wrong, c.peer_to_ours.geomean(), c.peer_to_ours.worst(), c.peer_to_ours.for_nothing(), c.peer_steps,
               c.our_steps);
  }
  if (!results.times.empty()) {
    fmt::print("\n## Planning time\n\n| mesh | model | median us | quartiles | worst |\n|---|---|---|---|---|\n");
  }
  for (const PlanningTime& t : results.times) {
    fmt::print("| {} | {} | {:.0f} | {:.0f}-{:.0f} | {:.0f} |\n", t.mesh, t.model, t.figure.median, t.figure.low,
               t.figure.high, t.worst);
  }
}

void write_json(const std::string& path, const Results& results) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Quality& q : results.quality) {
    rows.push_back({{"name", fmt::format("optimum {} {} {}", q.mesh, q.shape, q.model)},
                    {"pairs", q.pairs},
                    {"off", q.off},
                    {"above_limit", q.above_limit},
                    {"to_optimum", q.to_optimum.json()}});
    if (q.model == "bytes_only") rows.back()["to_bound"] = q.to_bound.json();
    if (q.off) rows.back()["first_off"] = q.first_off;
  }
  for (const Comparison& c : results.comparison) {
    rows.push_back({{"name", fmt::format("peer {} {}", c.mesh, c.shape)},
                    {"pairs", c.pairs},
                    {"unsupported", c.unsupported},
                    {"wrong", c.wrong},
                    {"peer_bytes", c.peer_bytes},
                    {"our_bytes", c.our_bytes},
                    {"peer_steps", c.peer_steps},
                    {"our_steps", c.our_steps},
                    {"peer_to_ours", c.peer_to_ours.json()}});
  }
  for (const PlanningTime& t : results.times) {
    rows.push_back({{"name", fmt::format("planning {} {}", t.mesh, t.model)},
                    {"ours_us", t.figure.median},
                    {"ours_quartiles_us", {t.figure.low, t.figure.high}},
                    {"worst_us", t.worst}});
  }
  std::ofstream file(path);
  file << nlohmann::json({{"benchmark", "plan_quality"}, {"rows", rows}}).dump(2) << "\n";
  if (!file) throw std::runtime_error(fmt::format("--json: cannot write {}", path));
}

// ---- what is measured ---------------------------------------------------------------------------------------------------

struct Setting {
  Sizes mesh, shape;
  std::size_t most = 0;  // pairs; 0: all
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

Results measure(const std::vector<Setting>& settings, int examples, const std::string& peer, std::size_t timed) {
  Results out;
  for (const auto& [mesh, shape, most] : settings) {
    for (Quality& quality : measure_quality(Mesh(mesh), shape, most, examples)) out.quality.push_back(std::move(quality));
    if (!peer.empty()) out.comparison.push_back(compare(Mesh(mesh), shape, most, peer));
  }
  if (timed == 0) return out;
  for (const Sizes& mesh : {Sizes{2, 2, 2}, Sizes{64, 8, 8}, Sizes{2, 2, 2, 2, 2}}) {
    for (PlanningTime& time : time_planning(Mesh(mesh), {4096, 8192}, timed)) out.times.push_back(std::move(time));
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Plans beside the optimum, beside PyTorch's, and the time that planning takes");
  std::string json, peer_script;
  std::size_t pairs_3d = 20000, pairs_64 = 2000, timed = 301;
  int examples = 0;
  app.add_option("--json", json, "write the figures there too");
  app.add_option("--peer", peer_script, "PyTorch's side; without it only ours")->envname("TESSERA_PLAN_QUALITY_PEER");
  app.add_option("--pairs-3d", pairs_3d, "pairs on a mesh of (2, 2, 2)")->check(CLI::PositiveNumber);
  app.add_option("--pairs-64", pairs_64, "pairs on a mesh of (8, 8)")->check(CLI::PositiveNumber);
  app.add_option("--timed", timed, "pairs whose planning is timed, a mesh and model; 0: none");
  app.add_option("--examples", examples, "show so many plans that are off, a mesh, tensor and model");
  CLI11_PARSE(app, argc, argv);
  const char* python = std::getenv("TESSERA_PYTHON");
  try {
    const std::string peer = peer_script.empty() ? "" : fmt::format("{} {}", python ? python : "python3", peer_script);
    const Results results = measure(settings(pairs_3d, pairs_64), examples, peer, timed);
    print(results);
    if (!json.empty()) write_json(json, results);
    int64_t off = 0;
    for (const Quality& quality : results.quality) off += quality.off;
    if (off) fmt::print("\n{} plans are off; --examples 5 shows some\n", off);
    return off ? 1 : 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
