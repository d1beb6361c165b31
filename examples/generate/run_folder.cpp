#include "tessera/examples/generate/run_folder.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/collectives/collectives.h"

namespace {

namespace fs = std::filesystem;

// A training program's other settings are ignored. Those that are required say more than the weights' shapes do: the
// same weights are a model of 4 heads or of 8.
void read_options(const fs::path& file, Run& run) {
  std::ifstream in(file);
  if (!in) {
    throw std::invalid_argument(
        fmt::format("'{}' cannot be read; give a folder that tools/train has written", file.string()));
  }
  TransformerOptions& options = run.options;
  CLI::App app;
  app.allow_config_extras(CLI::config_extras_mode::ignore);
  app.add_option("--vocabulary", options.vocabulary)->check(CLI::Range(1, 256));
  app.add_option("--hidden", options.hidden)->required()->check(CLI::PositiveNumber);
  app.add_option("--layers", options.layers)->required()->check(CLI::PositiveNumber);
  app.add_option("--heads", options.heads)->required()->check(CLI::PositiveNumber);
  app.add_option("--sequence", options.sequence)->required()->check(CLI::PositiveNumber);
  app.add_flag("--tied", options.tied);
  std::string dtype;
  app.add_option("--dtype", dtype);
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
  // Layers that compute in other dtypes have parameters in float32.
  run.dtype = dtype == "float64" ? at::kDouble : at::kFloat;
}

std::string checkpoint_of(const fs::path& checkpoints, int64_t step) {
  return (checkpoints / fmt::format("step_{:08}", step)).string();
}

// A checkpoint that is not whole is passed over where the newest is asked for, and refused where its step is given.
int64_t chosen_step(const fs::path& checkpoints, std::optional<int64_t> step) {
  const std::optional<std::string> newest = tessera::newest_training_state(checkpoints.string());
  if (!newest) {
    throw std::invalid_argument(
        fmt::format("'{}' has no whole checkpoint; wait until the run has saved one", checkpoints.string()));
  }
  const int64_t newest_step = tessera::read_training_state(*newest).step;
  if (!step) return newest_step;
  const std::string chosen = checkpoint_of(checkpoints, *step);
  if (!fs::exists(chosen)) {
    throw std::invalid_argument(fmt::format("'{}' has no checkpoint of step {}; the newest is that of step {}",
                                            checkpoints.string(), *step, newest_step));
  }
  return tessera::read_training_state(chosen).step;
}

}  // namespace

Run open_run(const std::string& folder, std::optional<int64_t> step, const tessera::DeviceMesh& mesh) {
  const fs::path checkpoints = fs::path(folder) / "checkpoints";
  Run run;
  tessera::Agreement({mesh}, "generate")
      .run(
          [&] {
            read_options(fs::path(folder) / "config.ini", run);
            run.step = chosen_step(checkpoints, step);
          },
          [&] {
            const TransformerOptions& of = run.options;
            return fmt::format("{} {} {} {} {} {} {}", of.vocabulary, of.hidden, of.layers, of.heads, of.sequence,
                               of.tied, c10::toString(run.dtype));
          },
          "the ranks read different models in config.ini; all of them need the same folder");
  const at::Tensor seen_here = at::scalar_tensor(run.step, at::kLong).view(1).to(mesh.device());
  run.step = tessera::all_reduce(seen_here, mesh, 0, tessera::ReduceOp::kMin).item<int64_t>();
  run.checkpoint = checkpoint_of(checkpoints, run.step);
  return run;
}
