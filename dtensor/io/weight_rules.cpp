#include "tessera/dtensor/io/weight_rules.h"

#include <ostream>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/io/name_pattern.h"

namespace tessera {
namespace {

std::string text_of(const WeightSource::Transpose& step) {
  return fmt::format(".transpose({}, {})", step.first, step.second);
}
std::string text_of(const WeightSource::Narrow& step) {
  return fmt::format(".narrow({}, {}, {})", step.tensor_dim, step.begin, step.size);
}
std::string text_of(const WeightSource::Split& step) {
  return fmt::format(".split({}, {}, {})", step.tensor_dim, step.index, step.parts);
}
std::string text_of(const WeightSource::Unflatten& step) {
  return fmt::format(".unflatten({}, {{{}}})", step.tensor_dim, fmt::join(step.sizes, ", "));
}
std::string text_of(const WeightSource::Flatten& step) {
  return fmt::format(".flatten({}, {})", step.first, step.last);
}

}  // namespace

WeightSource from_file(std::string name) {
  WeightSource source;
  source.file_name_ = std::move(name);
  return source;
}

WeightSource fuse(int64_t tensor_dim, std::vector<WeightSource> parts) {
  if (parts.empty()) throw std::invalid_argument("fuse: there is nothing to join; give it one part or more");
  WeightSource source;
  source.fused_dim_ = tensor_dim;
  source.parts_ = std::move(parts);
  return source;
}

WeightSource WeightSource::then(Step step) const {
  WeightSource next = *this;
  next.steps_.push_back(std::move(step));
  return next;
}

std::vector<std::string> WeightSource::file_names() const {
  if (parts_.empty()) return {file_name_};
  std::vector<std::string> names;
  for (const WeightSource& part : parts_) {
    const std::vector<std::string> more = part.file_names();
    names.insert(names.end(), more.begin(), more.end());
  }
  return names;
}

WeightSource WeightSource::filled(const std::vector<std::string>& captured) const {
  WeightSource result = *this;
  result.file_name_ = tessera::filled(file_name_, captured);
  for (WeightSource& part : result.parts_) part = part.filled(captured);
  return result;
}

std::string to_string(const WeightSource& source) {
  std::string text;
  if (source.parts().empty()) {
    text = fmt::format("from_file(\"{}\")", source.file_name());
  } else {
    std::vector<std::string> parts;
    for (const WeightSource& part : source.parts()) parts.push_back(to_string(part));
    text = fmt::format("fuse({}, {{{}}})", source.fused_dim(), fmt::join(parts, ", "));
  }
  for (const WeightSource::Step& step : source.steps()) {
    text += std::visit([](const auto& each) { return text_of(each); }, step);
  }
  return text;
}

std::string to_string(const WeightRule& rule) {
  return fmt::format("\"{}\" <- {}", rule.module_name, to_string(rule.source));
}

std::string to_string(const WeightRules& rules) {
  std::string text;
  for (const WeightRule& rule : rules.rules) text += to_string(rule) + "\n";
  if (!rules.ignored.empty()) text += fmt::format("ignored: {}\n", fmt::join(rules.ignored, ", "));
  return text;
}

std::ostream& operator<<(std::ostream& out, const WeightSource& source) { return out << to_string(source); }
std::ostream& operator<<(std::ostream& out, const WeightRule& rule) { return out << to_string(rule); }

}  // namespace tessera
