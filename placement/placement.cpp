#include "tessera/placement/placement.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <ostream>
#include <stdexcept>

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr std::array kReduceOps = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct};

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// The text between "X(" and ")", or nullopt.
std::optional<std::string_view> argument(std::string_view text, char letter) {
  if (text.size() < 4 || text[0] != letter || text[1] != '(' || text.back() != ')') return std::nullopt;
  return text.substr(2, text.size() - 3);
}

std::optional<int64_t> parse_int(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<Placement> try_parse(std::string_view text) {
  if (text == "R") return Replicate();
  if (const auto dim = argument(text, 'S')) {
    if (const auto value = parse_int(*dim)) return Shard(*value);
  }
  if (const auto name = argument(text, 'P')) {
    for (const ReduceOp op : kReduceOps) {
      if (to_string(op) == *name) return Partial(op);
    }
  }
  return std::nullopt;
}

}  // namespace

std::string to_string(const Placement& placement) {
  switch (placement.kind()) {
    case Placement::Kind::kReplicate: return "R";
    case Placement::Kind::kShard: return fmt::format("S({})", placement.tensor_dim());
    case Placement::Kind::kPartial: return fmt::format("P({})", to_string(placement.op()));
  }
  throw std::logic_error("to_string: not a placement kind");
}

std::string to_string(const Placements& placements) {
  std::string out = "[";
  for (const Placement& placement : placements) {
    if (out.size() > 1) out += ", ";
    out += to_string(placement);
  }
  return out + "]";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << to_string(placement); }

Placement parse_placement(std::string_view text) {
  if (const auto placement = try_parse(trim(text))) return *placement;
  throw std::invalid_argument(fmt::format(
      "parse_placement: \"{}\" is no placement; write R, S(dim) such as S(0), or P(op) with op one of sum, avg, max, min, "
      "product",
      text));
}

Placements parse_placements(std::string_view text) {
  const std::string_view whole = trim(text);
  if (whole.size() < 2 || whole.front() != '[' || whole.back() != ']') {
    throw std::invalid_argument(
        fmt::format("parse_placements: \"{}\" is no list of placements; write e.g. [S(0), R]", text));
  }
  Placements out;
  std::string_view rest = trim(whole.substr(1, whole.size() - 2));
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    out.push_back(parse_placement(rest.substr(0, comma)));
    if (comma == std::string_view::npos) break;
    rest = rest.substr(comma + 1);
  }
  return out;
}

bool any_partial(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
}

Placements without_partial(Placements placements) {
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return placements;
}

bool all_replicate(const Placements& placements) {
  return std::all_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_replicate(); });
}

bool partials_commute(const Placements& placements) {
  const auto linear = [](const Placement& p) { return p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg); };
  const auto first = std::find_if(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
  return std::all_of(first, placements.end(),
                     [&](const Placement& p) { return !p.is_partial() || p == *first || (linear(p) && linear(*first)); });
}

}  // namespace tessera
