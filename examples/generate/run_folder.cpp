#include "tessera/examples/generate/run_folder.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <stdexcept>
#include <vector>

#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include "tessera/dtensor/agreement.h"
#include "tessera/mesh/collectives/collectives.h"

namespace {

namespace fs = std::filesystem;

// A training program's other settings are ignored. Those that are required say more than the weights' shapes do: the
// same weights are a model of 4 heads or of 8.
TransformerOptions read_options(const fs::path& file) {
  std::ifstream in(file);
  if (!in) {
    throw std::invalid_argument(
        fmt::format("'{}' cannot be read; give a folder that tools/train has written", file.string()));
  }
  TransformerOptions options;
  CLI::App app;
  app.allow_config_extras(CLI::config_extras_mode::ignore);
  app.add_option("--vocabulary", options.vocabulary)->check(CLI::Range(1, 256));
  app.add_option("--hidden", options.hidden)->required()->check(CLI::PositiveNumber);
  app.add_option("--layers", options.layers)->required()->check(CLI::PositiveNumber);
  app.add_option("--heads", options.heads)->required()->check(CLI::PositiveNumber);
  app.add_option("--sequence", options.sequence)->required()->check(CLI::PositiveNumber);
  app.add_flag("--tied", options.tied);
  try {
    app.parse_from_stream(in);
  } catch (const CLI::ParseError& error) {
    throw std::invalid_argument(
        fmt::format("'{}': {}; it describes the model that the run trains", file.string(), error.what()));
  }
  if (options.hidden % options.heads != 0) {
    throw std::invalid_argument(
        fmt::format("'{}': {} heads do not divide {} hidden features", file.string(), options.heads, options.hidden));
  }
  return options;
}

// Returns the steps of the checkpoints that are complete, in ascending order.
std::vector<int64_t> steps_in(const fs::path& checkpoints) {
  std::vector<int64_t> steps;
  if (!fs::is_directory(checkpoints)) return steps;
  for (const fs::directory_entry& entry : fs::directory_iterator(checkpoints)) {
    std::smatch match;
    const std::string name = entry.path().filename().string();
    const bool is_complete = fs::exists(entry.path() / "state.json") || fs::exists(entry.path() / "model.safetensors");
    if (is_complete && std::regex_match(name, match, std::regex("step_([0-9]{8,18})"))) {
      steps.push_back(std::stoll(match[1]));
    }
  }
  std::ranges::sort(steps);
  return steps;
}

std::string checkpoint_of(int64_t step) { return fmt::format("step_{:08}", step); }

int64_t chosen_step(const fs::path& checkpoints, std::optional<int64_t> step) {
  const std::vector<int64_t> steps = steps_in(checkpoints);
  if (steps.empty()) {
    throw std::invalid_argument(
        fmt::format("'{}' has no complete checkpoint; wait until the run has saved one", checkpoints.string()));
  }
  if (!step) return steps.back();
  if (std::ranges::find(steps, *step) == steps.end()) {
    throw std::invalid_argument(fmt::format("'{}' has no checkpoint of step {}; it has those of {}",
                                            checkpoints.string(), *step, fmt::join(steps, ", ")));
  }
  return *step;
}

}  // namespace

Run open_run(const std::string& folder, std::optional<int64_t> step, const tessera::DeviceMesh& mesh) {
  const fs::path checkpoints = fs::path(folder) / "checkpoints";
  Run run;
  tessera::Agreement({mesh}, "generate").run([&] {
    run.options = read_options(fs::path(folder) / "config.ini");
    run.step = chosen_step(checkpoints, step);
  });
  const at::Tensor seen_here = at::scalar_tensor(run.step, at::kLong).view(1);
  run.step = tessera::all_reduce(seen_here, mesh, 0, tessera::ReduceOp::kMin).item<int64_t>();
  run.checkpoint = (checkpoints / checkpoint_of(run.step)).string();
  return run;
}
