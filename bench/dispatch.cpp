// Measures what a DTensor adds to an operator's time, beside what PyTorch's DTensor adds to its own. It uses small
// tensors and a fake group of 8 ranks, so nothing is communicated. On a GPU it measures the time of the CPU, which
// queues the work. With --cold it writes to much memory and runs through much code before each call, as a GPU's driver
// may.

#include <cstdlib>
#include <iostream>
#include <optional>
#include <stdexcept>

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "tessera/bench/dispatch_cases.h"
#include "tessera/bench/measure.h"

namespace {

using tessera::bench::Case;
using tessera::bench::Row;

std::optional<double> median_of(const std::optional<tessera::bench::Figure>& figure) {
  return figure ? std::optional(figure->median) : std::nullopt;
}

void print(const std::vector<Row>& rows) {
  fmt::print("{:<24}{:>9}{:>9}{:>9}{:>16}{:>10}{:>10}{:>10}{:>8}\n", "us per call", "ours", "plain", "added",
             "(quartiles)", "peer", "plain", "added", "ratio");
  for (const Row& r : rows) {
    const double ours = r.ours.median - r.plain.median;
    fmt::print("{:<24}{:>9.2f}{:>9.2f}{:>9.2f}{:>16}", r.name, r.ours.median, r.plain.median, ours,
               fmt::format("{:.2f}-{:.2f}", r.ours.low - r.plain.median, r.ours.high - r.plain.median));
    std::optional<double> theirs;
    if (r.peer) theirs = r.peer->median - (r.peer_plain ? r.peer_plain->median : 0);
    const auto figure = [](const std::optional<double>& value, int digits) {
      return value ? fmt::format("{:.{}f}", *value, digits) : "-";
    };
    fmt::print("{:>10}{:>10}{:>10}{:>8}\n", figure(median_of(r.peer), 2), figure(median_of(r.peer_plain), 2),
               figure(theirs, 2), figure(theirs && ours > 0 ? std::optional(*theirs / ours) : std::nullopt, 1));
  }
  fmt::print(
      "ratio: what the peer (PyTorch's DTensor) adds over what ours adds; -: the peer has no such call or was "
      "not asked, or ours adds nothing\n");
}

// Returns the goals of `cases`; `rows` are their figures, in the same order.
std::vector<tessera::bench::Goal> goals_of(const std::vector<Case>& cases, const std::vector<Row>& rows) {
  std::vector<tessera::bench::Goal> out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double ours = rows[i].ours.median, plain = rows[i].plain.median;
    if (const double most = cases[i].most_added; most > 0) {
      out.push_back(
          {fmt::format("{}: at most {} us added: {:.2f}", rows[i].name, most, ours - plain), ours - plain <= most});
    }
    if (const double most = cases[i].most_times; most > 0) {
      out.push_back(
          {fmt::format("{}: at most {} times plain: {:.3f}", rows[i].name, most, ours / plain), ours <= most * plain});
    }
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What a DTensor adds to an operator's time, beside PyTorch's DTensor");
  std::string json;
  int rounds = 51;
  int calls = 200;
  std::string peer_script;
  std::string only;
  std::string device = "cpu";
  bool check = false;
  bool cold = false;
  auto* const checks = app.add_flag("--check", check, "fail when a goal is missed");
  app.add_flag("--cold", cold, "time each call with cold caches, without the peer's times and the goals")
      ->excludes(checks);
  app.add_option("--device", device, "where the tensors are")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--only", only, "measure this row alone");
  app.add_option("--json", json, "write the figures to this file too");
  app.add_option("--rounds", rounds, "interleaved rounds")->check(CLI::PositiveNumber);
  app.add_option("--calls", calls, "calls per round; slow cases make fewer")->check(CLI::PositiveNumber);
  app.add_option("--peer", peer_script, "the peer's program")->envname("TESSERA_DISPATCH_PEER")->required();
  CLI11_PARSE(app, argc, argv);
  const char* python = std::getenv("TESSERA_PYTHON");
  at::set_num_threads(1);
  try {
    const auto world = tessera::World::fake(0, 8);
    const c10::DeviceType type = c10::Device(device).type();
    const tessera::DeviceMesh mesh(world, type, tessera::Mesh({8}, {"tp"}));
    tessera::bench::Peer peer({python != nullptr ? python : "python3", peer_script, device});
    const auto settle = [&] {
      if (type != c10::kCPU) c10::impl::VirtualGuardImpl(type).synchronizeDevice(mesh.device().index());
    };
    std::vector<Case> wanted = tessera::bench::dispatch_cases(mesh);
    if (!only.empty()) std::erase_if(wanted, [&](const Case& c) { return c.subject.name != only; });
    if (wanted.empty()) throw std::invalid_argument(fmt::format("--only {}: there is no such row", only));
    std::vector<tessera::bench::Subject> subjects;
    for (const Case& each : wanted) {
      subjects.push_back(each.subject);
      if (cold) subjects.back().peer = false;
    }
    const std::vector<Row> rows = tessera::bench::measure(
        subjects, peer, rounds, calls, settle, cold ? tessera::bench::time_cold_calls : tessera::bench::time_calls);
    print(rows);
    const bool met = cold || tessera::bench::print_goals(goals_of(wanted, rows));
    if (!json.empty()) tessera::bench::write_json(json, "dispatch", rows);
    if (check && !met) return 1;
  } catch (const std::exception& error) {
    std::cerr << "dispatch: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
