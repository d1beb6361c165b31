#include "tessera/bench/plan_peer.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"
#include "tessera/tests/harness/brute_force.h"

namespace tessera::bench {
namespace {

std::string peer_request(const Mesh& mesh, const Sizes& shape, const Pair& pair) {
  const auto words = [](const Placements& placements) {
    std::vector<std::string> out;
    for (const Placement& p : placements) out.push_back(to_string(p));
    return fmt::format("{}", fmt::join(out, " "));
  };
  return fmt::format("{};{};{};{}\n", fmt::join(mesh.shape(), ","), fmt::join(shape, ","), words(pair.first),
                     words(pair.second));
}

// Runs the peer and returns one answer per request.
std::vector<std::string> ask_peer(const std::string& command, const std::string& requests) {
  // The file has no name, so nothing is left behind.
  const std::unique_ptr<FILE, int (*)(FILE*)> input(std::tmpfile(), std::fclose);
  if (!input || std::fputs(requests.c_str(), input.get()) == EOF || std::fflush(input.get()) != 0) {
    throw std::runtime_error("--peer: cannot write the requests to a temporary file");
  }
  FILE* const pipe = popen(fmt::format("{} < /proc/self/fd/{}", command, fileno(input.get())).c_str(), "r");
  if (!pipe) throw std::runtime_error(fmt::format("--peer: cannot start {}", command));
  std::string text;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) text += static_cast<char>(c);
  const int status = pclose(pipe);
  std::vector<std::string> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) out.push_back(line);
  const auto asked = std::count(requests.begin(), requests.end(), '\n');
  if (status != 0 || static_cast<int64_t>(out.size()) != asked) {
    throw std::runtime_error(fmt::format("--peer: {} answers to {} requests, status {}", out.size(), asked, status));
  }
  return out;
}

// Adds up the bytes of "mesh dimension:placement" steps, each over one mesh dimension, computed like those of our
// steps. Returns false if a step is impossible.
bool follow(std::istringstream& words, Placements now, brute::BruteForce& steps_of, double& bytes, int64_t& steps) {
  for (std::string word; words >> word;) {
    const std::size_t colon = word.find(':');
    const auto mesh_dim = static_cast<std::size_t>(std::stoll(word.substr(0, colon)));
    Placements next = now;
    next[mesh_dim] = parse_placement(word.substr(colon + 1));
    std::optional<brute::Step> cheapest;  // the cheaper kind of reduction, for the peer too
    for (const brute::Step& step : steps_of.steps(now, next)) {
      const bool along = (step.over & ~(brute::MeshDims{1} << mesh_dim)) == 0;
      if (along && (!cheapest || step.bytes < cheapest->bytes)) cheapest = step;
    }
    if (!cheapest) return false;
    bytes += cheapest->bytes;
    steps += cheapest->over != 0;
    now = std::move(next);
  }
  return true;
}

}  // namespace

Comparison compare_with_peer(const Mesh& mesh, const Sizes& shape, std::size_t most, const std::string& command) {
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
    std::istringstream words(answers[i]);  // bytes | steps
    double counted = 0, least = 0;
    int64_t steps = 0;
    std::string bar;
    if (!(words >> counted >> bar) || bar != "|")
      throw std::runtime_error(fmt::format("--peer: answers {}", answers[i]));
    if (!follow(words, asked[i].first, steps_of, least, steps)) {
      ++out.wrong;
      continue;
    }
    const Plan plan =
        plan_redistribute(shape, at::kFloat, mesh, asked[i].first, asked[i].second, CostModel::bytes_only(mesh.ndim()));
    const auto ours = static_cast<double>(plan.max_bytes());
    out.peer_bytes += counted;
    out.peer_least_bytes += least;
    out.our_bytes += ours;
    out.peer_steps += steps;
    for (const PlanStep& step : plan.steps()) out.our_steps += step.kind != PlanStep::Kind::kLocal;
    out.peer_to_ours.add(counted, ours);
    out.peer_least_to_ours.add(least, ours);
  }
  return out;
}

}  // namespace tessera::bench
