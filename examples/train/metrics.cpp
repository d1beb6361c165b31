#include "tessera/examples/train/metrics.h"

#include <cerrno>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/examples/train/replace_file.h"

namespace train {
namespace {

using Json = nlohmann::ordered_json;

Metric metric_of(const std::string& line, const std::string& path) {
  try {
    const Json json = Json::parse(line);
    Metric metric{.step = json.at("step"), .tokens = json.at("tokens")};
    if (json.contains("validation_loss")) {
      metric.loss = json.at("validation_loss");
      metric.bits_per_byte = json.at("bits_per_byte").get<double>();
      return metric;
    }
    metric.loss = json.at("loss");
    metric.tokens_per_second = json.at("tokens_per_second");
    metric.learning_rate = json.at("learning_rate");
    metric.gradient_norm = json.at("gradient_norm");
    return metric;
  } catch (const Json::exception& error) {
    throw std::invalid_argument(fmt::format("'{}': the line {} is none of a run: {}", path, line, error.what()));
  }
}

}  // namespace

std::string to_json(const Metric& metric) {
  Json json = {{"step", metric.step}};
  if (metric.bits_per_byte) {
    json["tokens"] = metric.tokens;
    json["validation_loss"] = metric.loss;
    json["bits_per_byte"] = *metric.bits_per_byte;
  } else {
    json["loss"] = metric.loss;
    json["tokens"] = metric.tokens;
    json["tokens_per_second"] = metric.tokens_per_second;
    json["learning_rate"] = metric.learning_rate;
    json["gradient_norm"] = metric.gradient_norm;
  }
  return json.dump();
}

std::vector<Metric> read_metrics(const std::string& path) {
  std::vector<Metric> out;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!file.eof()) out.push_back(metric_of(line, path));  // a finished line has a line feed behind it
  }
  return out;
}

MetricsFile::MetricsFile(const std::string& path, int64_t first_step, int64_t steps) : path_(path) {
  std::string kept;
  for (const Metric& metric : read_metrics(path)) {
    const bool is_made_again = metric.bits_per_byte.has_value() && metric.step == steps;
    if (metric.step <= first_step && !is_made_again) kept += to_json(metric) + '\n';
  }
  replace_file(path, kept);
  errno = 0;
  file_.open(path, std::ios::app);
  if (!file_) throw_not_written(path_, errno);
}

void MetricsFile::add(const Metric& metric) {
  errno = 0;
  file_ << to_json(metric) << std::endl;
  if (!file_) throw_not_written(path_, errno);
}

}  // namespace train
