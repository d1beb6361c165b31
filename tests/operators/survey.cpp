#include "tessera/tests/operators/survey.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "tessera/tests/operators/calls.h"

namespace tessera::testing {
namespace {

Status status_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kByRule: return Status::kByRule;
    case Verdict::kReplicated: return Status::kReplicated;
    case Verdict::kRefused: return Status::kRefused;
    case Verdict::kWrong: break;
  }
  return Status::kWrong;
}

std::string short_name(const std::string& overload) { return overload.substr(std::string("aten::").size()); }

// Overloads by operator: "add (Scalar, Tensor)", those of one name together.
std::string listed(const std::vector<const Entry*>& entries) {
  std::map<std::string, std::vector<std::string>> by_name;
  for (const Entry* entry : entries) {
    const std::string name = short_name(entry->overload);
    const auto dot = name.find('.');
    by_name[name.substr(0, dot)].push_back(dot == std::string::npos ? "" : name.substr(dot + 1));
  }
  std::string out;
  for (const auto& [name, overloads] : by_name) {
    out += (out.empty() ? "`" : ", `") + name + '`';
    std::string several;
    for (const std::string& overload : overloads) {
      if (!overload.empty()) several += (several.empty() ? "" : " ") + overload;
    }
    if (!several.empty()) out += " (" + several + ')';
  }
  return out + "\n";
}

}  // namespace

Entry survey(const std::string& overload) {
  if (std::string reason = out_of_scope(overload); !reason.empty())
    return {overload, Status::kOutOfScope, std::move(reason)};
  const std::vector<Sample> calls = calls_of(overload);
  if (calls.empty()) return {overload, Status::kNotCalled, {}};
  Finding worst;
  uint64_t seed = 1;
  for (const Sample& sample : calls) {
    Finding found = validate_layouts(WholeCall(sample), seed++);
    if (found.verdict > worst.verdict) worst = std::move(found);
  }
  return {overload, status_of(worst.verdict), std::move(worst.text)};
}

const char* to_string(Status status) {
  switch (status) {
    case Status::kByRule: return "right by rule";
    case Status::kReplicated: return "right by replicating";
    case Status::kRefused: return "refused";
    case Status::kWrong: return "wrong";
    case Status::kNotCalled: return "not called";
    case Status::kOutOfScope: break;
  }
  return "out of scope";
}

std::string operators_page(const std::vector<Entry>& entries) {
  std::map<Status, std::vector<const Entry*>> by_status;
  for (const Entry& entry : entries) by_status[entry.status].push_back(&entry);
  const auto of = [&](Status status) { return by_status[status]; };
  std::string out =
      "# Operators\n\nEvery overload of ATen's in LibTorch 2.11 that takes a tensor, as `bazel run "
      "//tests/operators:report` finds it: "
      "its calls\non DTensors beside the same on plain tensors, in many layouts on 2, 3 and 4 ranks, pieces uneven and "
      "empty, terms of "
      "different\nsizes and signs. `//tests/operators:operators_test` fails when this page is not what it finds.\n\n"
      "| | overloads |\n| --- | --- |\n";
  for (const Status status :
       {Status::kByRule, Status::kReplicated, Status::kRefused, Status::kWrong, Status::kNotCalled, Status::kOutOfScope}) {
    out += fmt::format("| {} | {} |\n", to_string(status), of(status).size());
  }
  out += "\n## Right by rule\n\nIn no layout was an input brought to Replicate for want of a rule.\n\n" +
         listed(of(Status::kByRule));
  out += "\n## Right by replicating\n\nIn some layout, at least. The results are replicated.\n\n" +
         listed(of(Status::kReplicated));
  out += "\n## Refused\n\nIn some layout, at least, by an error on every rank.\n\n| overload | the error |\n| --- | --- |\n";
  for (const Entry* entry : of(Status::kRefused)) {
    std::string text = entry->text.substr(0, entry->text.find("; on {"));
    std::replace(text.begin(), text.end(), '|', '/');
    out += fmt::format("| `{}` | {} |\n", short_name(entry->overload), text.substr(0, 160));
  }
  out += "\n## Not called\n\nNo arguments were found by hand or from the schema; most are steps of other operators.\n\n" +
         listed(of(Status::kNotCalled));
  out += "\n## Out of scope\n\n";
  std::map<std::string, std::vector<const Entry*>> by_reason;
  for (const Entry* entry : of(Status::kOutOfScope)) by_reason[entry->text].push_back(entry);
  for (const auto& [reason, group] : by_reason) out += fmt::format("- {}: {}", reason, listed(group));
  return out;
}

}  // namespace tessera::testing
