#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace train {

// Is one line of metrics.jsonl: of a step, or of a look at held-out text after a step.
struct Metric {
  int64_t step = 0;    // steps that are done
  int64_t tokens = 0;  // of all these steps
  double loss = 0;     // in nats per byte; of the held-out text where bits_per_byte is there
  std::optional<double> bits_per_byte;
  double tokens_per_second = 0;
  double learning_rate = 0;
  double gradient_norm = 0;
};

// Returns {"step": 10, "loss": ..., "tokens": ..., "tokens_per_second": ..., "learning_rate": ..., "gradient_norm":
// ...} or {"step": 10, "tokens": ..., "validation_loss": ..., "bits_per_byte": ...}.
std::string to_json(const Metric& metric);

// Reads a metrics.jsonl; a last line that was not finished is left out. Returns nothing where there is no file. Throws
// std::invalid_argument on a line that is none of ours.
std::vector<Metric> read_metrics(const std::string& path);

// Appends to a metrics.jsonl. A run of `steps` that goes on after `first_step` of them first drops what the file has of
// later ones, and of the evaluation at its end, which it makes again. The file is replaced at once: a process that is
// killed meanwhile loses no line.
class MetricsFile {
 public:
  // Throws std::runtime_error when the file cannot be written, as add does.
  MetricsFile(const std::string& path, int64_t first_step, int64_t steps);
  void add(const Metric& metric);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace train
