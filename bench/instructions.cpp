// Counts the instructions of a cached call with Valgrind's callgrind, which other load on the machine does not change.
// The program starts itself under Valgrind, where it requests a dump after each subject, and reads the dumps.

#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <valgrind/callgrind.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tessera/bench/dispatch_cases.h"
#include "tessera/bench/measure.h"
#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

constexpr int kCalls = 100;

void count(const std::string& name, const std::function<void()>& body) {
  for (int i = 0; i < 20; ++i) body();
  CALLGRIND_ZERO_STATS;
  for (int i = 0; i < kCalls; ++i) body();
  CALLGRIND_DUMP_STATS_AT(name.c_str());
}

void run_subjects(const std::vector<std::string>& names) {
  at::set_num_threads(1);
  const auto world = tessera::World::fake(0, 8);
  const tessera::DeviceMesh mesh(world, c10::kCPU, tessera::Mesh({8}, {"tp"}));
  const std::vector<tessera::bench::Case> cases = tessera::bench::dispatch_cases(mesh);
  CALLGRIND_START_INSTRUMENTATION;
  for (const std::string& name : names) {
    const auto found = std::ranges::find(cases, name, [](const auto& each) { return each.subject.name; });
    if (found == cases.end()) throw std::invalid_argument(fmt::format("--rows: no row is called {}", name));
    count("ours " + name, found->subject.ours);
    if (found->subject.plain) count("plain " + name, found->subject.plain);
  }
  CALLGRIND_STOP_INSTRUMENTATION;
}

// Runs this program under Valgrind with the same arguments; the dumps go to `folder`.
void run_under_valgrind(const std::string& folder, char** argv) {
  std::vector<std::string> command = {"valgrind", "--tool=callgrind", "--instr-atstart=no",
                                      "--callgrind-out-file=" + folder + "/dump", "--log-file=" + folder + "/log"};
  for (; *argv != nullptr; ++argv) command.emplace_back(*argv);
  const tessera::Program program(std::move(command));
  const int code = tessera::wait_for(tessera::start_child([&]() -> int { program.exec(); }));
  if (code == 127) throw std::runtime_error("valgrind cannot be started: tools/setup installs it");
  if (code != 0) throw std::runtime_error("the run under valgrind failed: see above");
}

// Returns the instructions per call of each dump, by the dump's name.
std::map<std::string, double> read_dumps(const std::string& folder) {
  std::map<std::string, double> out;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(file.path());
    std::string line, name;
    const std::string trigger = "desc: Trigger: Client Request: ";
    while (std::getline(in, line)) {
      if (line.starts_with(trigger)) name = line.substr(trigger.size());
      if (!name.empty() && line.starts_with("totals: ")) out[name] = std::stod(line.substr(8)) / kCalls;
    }
  }
  return out;
}

void report(const std::vector<std::string>& names, const std::map<std::string, double>& counts,
            const std::string& json) {
  fmt::print("{:<24}{:>10}{:>10}{:>10}\n", "instructions per call", "ours", "plain", "added");
  nlohmann::json rows = nlohmann::json::array();
  for (const std::string& name : names) {
    const double ours = counts.at("ours " + name);
    const auto plain = counts.find("plain " + name);
    const double beside = plain == counts.end() ? 0 : plain->second;
    fmt::print("{:<24}{:>10.0f}{:>10.0f}{:>10.0f}\n", name, ours, beside, ours - beside);
    rows.push_back({{"name", name}, {"ours", ours}, {"plain", beside}, {"added", ours - beside}});
  }
  if (!json.empty()) tessera::bench::write_json(json, "instructions", rows);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Instructions of a cached call on DTensors and on plain tensors, by callgrind");
  std::string json;
  std::vector<std::string> rows = {"add", "mm"};
  app.add_option("--rows", rows, "rows of `tools/bench dispatch`");
  app.add_option("--json", json, "write the figures to this file too");
  CLI11_PARSE(app, argc, argv);
  try {
    if (RUNNING_ON_VALGRIND != 0) {
      run_subjects(rows);
      return 0;
    }
    const tessera::PrivateFolder folder;
    run_under_valgrind(folder.path(), argv);
    report(rows, read_dumps(folder.path()), json);
  } catch (const std::exception& error) {
    std::cerr << "instructions: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
