#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/examples/generate/generate_options.h"

namespace CLI {
class App;
}  // namespace CLI

// Holds the command line of examples/generate.
struct ProgramOptions {
  std::string run;
  std::optional<int64_t> step;
  std::string prompt;
  std::string prompt_file;
  std::string dtype = "float32";
  std::string device = "cpu";
  uint64_t seed = 0;
  bool shows_statistics = false;
  bool ends_line = false;  // writes a line feed at the end, as on a terminal
  GenerateOptions generate;

  at::ScalarType scalar_type() const { return dtype == "float64" ? at::kDouble : at::kFloat; }
};

void add_options(CLI::App& app, ProgramOptions& options);

// Returns the bytes of the prompt as tokens. Throws std::invalid_argument when there is none, or when a byte is no
// token of the model.
std::vector<int64_t> prompt_tokens(const ProgramOptions& options, int64_t vocabulary);
