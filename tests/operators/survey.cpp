#include "tessera/tests/operators/survey.h"

#include <algorithm>
#include <array>
#include <map>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/tests/operators/calls.h"
#include "tessera/tests/operators/gradients.h"
#include "tessera/tests/operators/validate.h"

namespace tessera::testing {
namespace {

constexpr std::array kStatuses = {Status::kByRule, Status::kReplicated, Status::kRefused,
                                  Status::kWrong,  Status::kNotCalled,  Status::kOutOfScope};
constexpr std::array kGradients = {Gradient::kRight, Gradient::kRefused, Gradient::kWrong, Gradient::kNone};

Status status_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kByRule: return Status::kByRule;
    case Verdict::kReplicated: return Status::kReplicated;
    case Verdict::kRefused: return Status::kRefused;
    case Verdict::kRefusedByOne:
    case Verdict::kWrong: break;
  }
  return Status::kWrong;
}

Gradient gradient_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kByRule:
    case Verdict::kReplicated: return Gradient::kRight;
    case Verdict::kRefused: return Gradient::kRefused;
    case Verdict::kRefusedByOne:
    case Verdict::kWrong: break;
  }
  return Gradient::kWrong;
}

std::string section_text(Status status) {
  switch (status) {
    case Status::kByRule: return "In no layout was an input brought to Replicate for want of a rule.";
    case Status::kReplicated: return "In at least one layout they run replicated.";
    case Status::kRefused: return "In at least one layout they throw, on every rank alike.";
    case Status::kWrong:
      return "Their results differ from those of plain tensors, or some ranks throw what others do not.";
    case Status::kNotCalled: return "No call of them is made, each for the reason that is given.";
    case Status::kOutOfScope: break;
  }
  return "They take tensors of another kind, or of another device.";
}

// Returns the overload's name on the page. "default" is PyTorch's word for no overload name.
std::pair<std::string, std::string> names_of(const std::string& overload) {
  const std::string name = overload.substr(std::string("aten::").size());
  const auto dot = name.find('.');
  return dot == std::string::npos ? std::pair{name, std::string("default")}
                                  : std::pair{name.substr(0, dot), name.substr(dot + 1)};
}

// Returns the remark for an operator that is right.
std::string remark(const WholeCall& call, Verdict verdict) {
  switch (comparable(call)) {
    case Comparable::kValues: return {};
    case Comparable::kDrawn:
      return verdict == Verdict::kReplicated ? "draws in its own kernel, on all ranks alike" : "";
    case Comparable::kUnrounded: return "bits are compared where no sum was rounded";
    case Comparable::kSizes: break;
  }
  return "sizes are compared: nobody has written the memory";
}

// Returns as much of an error as the page shows.
std::string shown(const Entry& entry) {
  const bool of_gradient = entry.status <= Status::kReplicated && !entry.gradient_text.empty();
  std::string text = of_gradient ? entry.gradient_text : entry.text;
  text = text.substr(0, text.find("; on {"));
  std::replace(text.begin(), text.end(), '|', '/');
  return text.substr(0, 160);
}

// Maps an operator, gradient and text to the overloads that share them.
using Rows = std::map<std::tuple<std::string, Gradient, std::string>, std::vector<std::string>>;

std::string rows_of(const std::vector<Entry>& entries, Status status) {
  Rows rows;
  for (const Entry& entry : entries) {
    if (entry.status != status) continue;
    const auto [name, overload] = names_of(entry.overload);
    rows[{name, entry.gradient, shown(entry)}].push_back(overload);
  }
  std::string out;
  for (const auto& [key, overloads] : rows) {
    const auto& [name, gradient, text] = key;
    out += fmt::format("| `{}` | {} | {} | {} |\n", name, fmt::join(overloads, ", "), to_string(gradient), text);
  }
  return out;
}

std::string summary(const std::vector<Entry>& entries) {
  std::string out = "| | overloads |";
  for (const Gradient gradient : kGradients) out += fmt::format(" gradient {} |", to_string(gradient));
  out += "\n| --- | --- | --- | --- | --- | --- |\n";
  for (const Status status : kStatuses) {
    const auto count = [&](auto&& holds) {
      return std::count_if(entries.begin(), entries.end(),
                           [&](const Entry& e) { return e.status == status && holds(e.gradient); });
    };
    out += fmt::format("| {} | {} |", to_string(status), count([](Gradient) { return true; }));
    for (const Gradient gradient : kGradients) {
      out += fmt::format(" {} |", count([&](Gradient g) { return g == gradient; }));
    }
    out += "\n";
  }
  return out;
}

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> out;
  std::size_t begin = 0;
  for (std::size_t at = 0; (at = text.find(separator, begin)) != std::string::npos; begin = at + separator.size()) {
    out.push_back(text.substr(begin, at - begin));
  }
  out.push_back(text.substr(begin));
  return out;
}

template <class All>
auto named(const All& all, const std::string& name) {
  const auto found = std::find_if(all.begin(), all.end(), [&](auto value) { return name == to_string(value); });
  if (found == all.end()) throw std::invalid_argument("docs/operators.md: what is '" + name + "'?");
  return *found;
}

}  // namespace

Entry survey(const std::string& overload) {
  Entry out{.overload = overload};
  if (out.text = out_of_scope(overload); !out.text.empty()) {
    out.status = Status::kOutOfScope;
    return out;
  }
  const std::vector<Sample> calls = calls_of(overload);
  if (calls.empty()) {
    out.text = why_not_called(overload);
    return out;
  }
  at::manual_seed(13);  // the calls do not depend on the overloads before
  Finding worst;
  std::string remarks;
  uint64_t seed = 1;
  for (const Sample& sample : calls) {
    const WholeCall call(sample);
    Finding found = validate_layouts(call, seed);
    if (remarks.empty()) remarks = remark(call, found.verdict);
    if (found.verdict > worst.verdict) worst = std::move(found);
    Gradients gradients(call, seed++);
    if (!gradients.differentiable()) continue;
    found = gradients.validate();
    if (gradient_of(found.verdict) <= out.gradient) continue;
    out.gradient = gradient_of(found.verdict);
    out.gradient_text = out.gradient == Gradient::kRight ? std::string() : std::move(found.text);
  }
  out.status = status_of(worst.verdict);
  out.text = worst.verdict > Verdict::kReplicated ? std::move(worst.text) : std::move(remarks);
  return out;
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

const char* to_string(Gradient gradient) {
  switch (gradient) {
    case Gradient::kRight: return "right";
    case Gradient::kRefused: return "refused";
    case Gradient::kWrong: return "wrong";
    case Gradient::kNone: break;
  }
  return "not differentiable";
}

std::string line_of(const Entry& entry) {
  return fmt::format("{}: {}", to_string(entry.status), rows_of({entry}, entry.status));
}

std::string operators_page(const std::vector<Entry>& entries) {
  std::string out =
      "# Operators\n\n"
      "This page lists every overload of ATen's operators in LibTorch 2.11 that takes a tensor.\n"
      "`bazel run //tests/operators:report` makes it: it calls each one on DTensors and on plain tensors and compares "
      "the\n"
      "results, in many layouts on 2, 3 and 4 ranks, with uneven and empty pieces, and with terms of different sizes "
      "and signs.\n"
      "Results that are drawn are compared with those of a DTensor on one rank. The gradient is that of all results by "
      "all\n"
      "tensors, from gradients of the results that lie in many layouts too; \"not differentiable\" are the calls for "
      "which\n"
      "LibTorch has no gradient on plain tensors either. An overload without a name is called `default`.\n"
      "`//tests/operators:operators_test` fails when this page is not what it finds.\n"
      "\n" +
      summary(entries);
  for (const Status status : kStatuses) {
    const std::string rows = rows_of(entries, status);
    if (rows.empty()) continue;
    std::string title = to_string(status);
    title[0] = static_cast<char>(std::toupper(title[0]));
    out += fmt::format("\n## {}\n\n{}\n\n| operator | overloads | gradient | why |\n| --- | --- | --- | --- |\n{}",
                       title, section_text(status), rows);
  }
  return out;
}

std::vector<Entry> entries_of(const std::string& page) {
  std::vector<Entry> out;
  std::istringstream lines(page);
  Status status = Status::kByRule;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("## ")) {
      line[3] = static_cast<char>(std::tolower(line[3]));
      status = named(kStatuses, line.substr(3));
    }
    if (!line.starts_with("| `")) continue;
    const std::vector<std::string> cells = split(line.substr(2, line.size() - 4), " | ");
    if (cells.size() != 4) throw std::invalid_argument("docs/operators.md: not four cells: " + line);
    const std::string name = cells[0].substr(1, cells[0].size() - 2);
    for (const std::string& overload : split(cells[1], ", ")) {
      out.push_back({.overload = "aten::" + name + (overload == "default" ? "" : "." + overload),
                     .status = status,
                     .gradient = named(kGradients, cells[2]),
                     .text = cells[3]});
    }
  }
  return out;
}

}  // namespace tessera::testing
