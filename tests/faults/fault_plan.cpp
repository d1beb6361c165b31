#include "tessera/tests/faults/fault_plan.h"

#include <sstream>
#include <stdexcept>

#include <fmt/format.h>

namespace tessera::faults {

std::string to_string(const FaultPlan& plan) {
  std::string text = fmt::format("rank={} fault={} point={} count={}", plan.rank, plan.fault, plan.point, plan.count);
  if (plan.point == "call") text += fmt::format(" call={} place={}", plan.call, plan.place);
  if (plan.error != 0) text += fmt::format(" error={} lasting={}", plan.error, plan.lasting ? 1 : 0);
  return text;
}

FaultPlan parse_fault_plan(const std::string& text) {
  FaultPlan plan;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (name == "rank") {
      plan.rank = std::stoll(value);
    } else if (name == "fault") {
      plan.fault = value;
    } else if (name == "point") {
      plan.point = value;
    } else if (name == "call") {
      plan.call = value;
    } else if (name == "place") {
      plan.place = value;
    } else if (name == "count") {
      plan.count = std::stoll(value);
    } else if (name == "error") {
      plan.error = std::stoi(value);
    } else if (name == "lasting") {
      plan.lasting = value == "1";
    } else {
      throw std::invalid_argument(fmt::format("a fault has no part '{}' (in '{}'); see to_string()", name, text));
    }
  }
  return plan;
}

}  // namespace tessera::faults
