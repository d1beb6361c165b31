#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace train {

// Says how a run is made. Every field is an option of the command line. Those that make the run what it is are lines of
// its config.ini too.
struct Options {
  // Where
  std::string run = "runs/train";  // the run's folder
  std::string data;                // a folder of text; empty: LibTorch's headers
  bool is_resumed = false;

  // The ranks
  int64_t dp = 2;
  int64_t tp = 2;
  std::string device = "cpu";  // what holds the ranks' tensors: cpu, cuda
  int64_t zero = 0;            // what is cut over dp too: 1: the optimizer's state; 2: gradients too; 3: parameters too

  // The model
  int64_t hidden = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t sequence = 128;
  bool is_tied = false;
  double dropout = 0.1;

  // The training
  std::string dtype = "auto";  // auto, float64, float32, bfloat16
  int64_t steps = 2000;
  int64_t stop_at = 0;  // ends after this step, as SIGTERM does; 0: at the last one
  int64_t batch = 8;    // sequences in the global batch of a step
  int64_t accumulate = 1;
  bool has_activation_checkpoints = false;
  double learning_rate = 3e-3;
  int64_t warm_up = 100;
  double weight_decay = 0.1;
  double clip = 1.0;
  int64_t seed = 1;

  // The output
  int64_t save_every = 500;
  int64_t keep = 3;  // the checkpoints that stay; 0: all
  int64_t validate_every = 200;
  int64_t log_every = 20;
  int64_t check_steps = 20;       // of the comparison with one process at the end; 0: there is none
  std::string progress = "auto";  // auto, line, plain

  bool is_dry_run = false;

  int64_t ranks() const { return dp * tp; }
};

// Is the outcome of reading a command line.
struct Parsed {
  Options options;
  std::string config;            // the text of a config.ini that gives the same run
  std::optional<int> exit_code;  // the program ends with it: an option was wrong, or --help was given
  std::string message;           // what the program prints then
};

// Reads options from the command line, and from the file that --config names, whose lines give way to the command line.
// With --resume and without --config it reads config.ini of the run's folder.
//
// A wrong name or value is answered with the right ones. Does not communicate; all ranks have the same arguments.
Parsed parse_options(int argc, const char* const* argv);

}  // namespace train
