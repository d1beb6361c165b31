#include "tessera/bench/two_sides.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <random>
#include <stdexcept>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace tessera::bench {
namespace {

std::vector<std::string> started_by(const SidesArguments& arguments, int64_t size, const std::string& backend,
                                    const std::vector<std::string>& command) {
  std::vector<std::string> out = {arguments.launch, "--no-prefix", "-n", std::to_string(size), "--backend", backend};
  out.insert(out.end(), command.begin(), command.end());
  return out;
}

std::vector<std::string> own_command() {
  return {std::filesystem::read_symlink("/proc/self/exe").string(), "--rank-at"};
}

std::vector<std::string> peer_command(const SidesArguments& arguments) {
  if (arguments.own_peer) return own_command();
  const char* python = std::getenv("TESSERA_PYTHON");
  return {python != nullptr ? python : "python3", arguments.peer_script};
}

int calls_for(double microseconds, double round_ms) {
  return static_cast<int>(std::clamp(round_ms * 1000 / std::max(microseconds, 1.0), 1.0, 200.0));
}

}  // namespace

void add_options(CLI::App& app, SidesArguments& arguments, const char* peer_variable) {
  app.add_option("--ranks", arguments.ranks, "numbers of ranks, one after the other")->delimiter(',');
  app.add_option("--backend", arguments.backend, "backend of our ranks; the peer uses Gloo")
      ->check(CLI::IsMember({"gloo", "mpi"}));
  app.add_option("--rounds", arguments.rounds, "interleaved rounds")->check(CLI::PositiveNumber);
  app.add_option("--round-ms", arguments.round_ms, "how long one measurement takes, or one call")
      ->check(CLI::PositiveNumber);
  app.add_option("--json", arguments.json, "write the figures to this file too");
  app.add_flag("--check", arguments.check, "fail when a goal is missed");
  app.add_flag("--quick", arguments.quick, "small sizes and few rounds, whatever is given, to see whether it runs");
  app.add_option("--launch", arguments.launch, "the launcher's program")->envname("TESSERA_LAUNCH");
  arguments.own_peer = peer_variable == nullptr;
  if (!arguments.own_peer) {
    app.add_option("--peer", arguments.peer_script, "the peer's program")->envname(peer_variable);
  }
  app.add_option("--rank-at", arguments.rank_at, "be a rank that gets its commands from this socket")->group("");
}

void check_arguments(const SidesArguments& arguments) {
  if (arguments.launch.empty() || (arguments.peer_script.empty() && !arguments.own_peer)) {
    throw std::invalid_argument("--launch and --peer are needed; tools/bench gives them");
  }
}

TwoSides::TwoSides(const SidesArguments& arguments, int64_t size)
    : ours("ours", started_by(arguments, size, arguments.backend, own_command()), size),
      peer("peer", started_by(arguments, arguments.own_peer ? 1 : size, "gloo", peer_command(arguments)),
           arguments.own_peer ? 1 : size) {}

double slowest(Ranks& ranks, const std::string& line) {
  double out = 0;
  for (const std::string& answer : ranks.ask(line)) out = std::max(out, std::stod(answer));
  return out;
}

std::map<std::string, std::vector<double>> interleaved(TwoSides& sides, const std::vector<Variant>& variants,
                                                       const SidesArguments& arguments) {
  const auto timed = [&](const Variant& variant, int calls) {
    return slowest(variant.peer ? sides.peer : sides.ours, fmt::format("{} {}", variant.name, calls));
  };
  std::vector<int> calls;
  for (const Variant& variant : variants) calls.push_back(calls_for(timed(variant, 1), arguments.round_ms));
  std::map<std::string, std::vector<double>> out;
  std::vector<std::size_t> order(variants.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 random(1);
  for (int round = 0; round < arguments.rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t at : order) out[variants[at].name].push_back(timed(variants[at], calls[at]));
  }
  return out;
}

int run_main(const char* name, const std::function<bool()>& body) {
  try {
    return body() ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << "\n";
    return 1;
  }
}

}  // namespace tessera::bench
