#include <charconv>
#include <optional>
#include <stdexcept>
#include <string>

#include <fmt/format.h>

#include "tessera/placement/placement.h"

namespace tessera {
namespace {

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// Splits `text` at separators that are outside parentheses. An empty text has no parts.
std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> out;
  if (trim(text).empty()) return out;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    depth += text[i] == '(' ? 1 : (text[i] == ')' ? -1 : 0);
    if (text[i] != separator || depth != 0) continue;
    out.push_back(text.substr(begin, i - begin));
    begin = i + 1;
  }
  out.push_back(text.substr(begin));
  return out;
}

// Returns the text between "NAME(" and ")", or nullopt.
std::optional<std::string_view> arguments(std::string_view text, std::string_view name) {
  if (text.size() < name.size() + 2 || !text.starts_with(name) || text[name.size()] != '(' || text.back() != ')') {
    return std::nullopt;
  }
  return text.substr(name.size() + 1, text.size() - name.size() - 2);
}

template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::vector<int64_t>> parse_ints(const std::vector<std::string_view>& texts) {
  std::vector<int64_t> out;
  for (const std::string_view text : texts) {
    const auto value = parse_number<int64_t>(text);
    if (!value) return std::nullopt;
    out.push_back(*value);
  }
  return out;
}

// Parses "0-2+6-8", or "-" for the empty set.
std::optional<Intervals> parse_intervals(std::string_view text) {
  Intervals out;
  if (trim(text) == "-") return out;
  if (trim(text).empty()) return std::nullopt;
  for (const std::string_view piece : split(text, '+')) {
    const auto ends = parse_ints(split(piece, '-'));
    if (!ends || ends->size() != 2) return std::nullopt;
    out.push_back({.begin = ends->front(), .end = ends->back()});
  }
  return out;
}

std::optional<ReduceOp> parse_op(std::string_view text) {
  for (const ReduceOp op : kPlainReductions) {
    if (to_string(op) == text) return op;
  }
  return std::nullopt;
}

std::optional<Placement> parse_partial(std::string_view text) {
  constexpr std::string_view kMasked = "masked ";
  constexpr std::string_view kNorm = "norm ";
  if (const auto op = parse_op(text)) return Partial(*op);
  if (text.starts_with(kMasked)) {
    if (const auto op = parse_op(text.substr(kMasked.size()))) return MaskedPartial(*op);
  }
  if (text.starts_with(kNorm)) {
    if (const auto p = parse_number<double>(text.substr(kNorm.size()))) return NormPartial(*p);
  }
  return std::nullopt;
}

std::optional<Placement> parse_interval_shard(const std::vector<std::string_view>& texts) {
  const auto dim = texts.empty() ? std::nullopt : parse_number<int64_t>(texts[0]);
  if (!dim || texts.size() < 2) return std::nullopt;
  std::vector<Intervals> parts;
  for (std::size_t i = 1; i < texts.size(); ++i) {
    const auto part = parse_intervals(texts[i]);
    if (!part) return std::nullopt;
    parts.push_back(*part);
  }
  return IntervalShard(*dim, parts);
}

std::optional<Placement> parse_shard(std::string_view text) {
  if (const auto inside = arguments(text, "IS")) return parse_interval_shard(split(*inside, ','));
  for (const std::string_view name : {"S", "BC", "RS"}) {
    const auto inside = arguments(text, name);
    if (!inside) continue;
    const auto numbers = parse_ints(split(*inside, ','));
    if (!numbers || numbers->empty()) return std::nullopt;
    if (name == "S" && numbers->size() == 1) return Shard(numbers->front());
    if (name == "BC" && numbers->size() == 2) return BlockCyclic(numbers->front(), numbers->back());
    if (name == "RS" && numbers->size() > 1) {
      return RaggedShard(numbers->front(), std::vector<int64_t>(numbers->begin() + 1, numbers->end()));
    }
  }
  return std::nullopt;
}

std::optional<Placement> try_parse(std::string_view text) {
  if (text == "R") return Replicate();
  if (const auto inside = arguments(text, "P")) return parse_partial(*inside);
  const auto at = text.find('@');
  const auto placement = parse_shard(text.substr(0, at));
  if (!placement || at == std::string_view::npos) return placement;
  const auto order = parse_number<int64_t>(text.substr(at + 1));
  return order ? std::optional(placement->ordered(*order)) : std::nullopt;
}

}  // namespace

Placement parse_placement(std::string_view text) {
  std::string why;
  try {
    if (const auto placement = try_parse(trim(text))) return *placement;
  } catch (const std::invalid_argument& error) {
    why = fmt::format(" ({})", error.what());
  }
  throw std::invalid_argument(fmt::format(
      "parse_placement: \"{}\" is no placement{}; write R, S(dim) such as S(0), BC(dim,block), RS(dim,size,size...), "
      "IS(dim,0-2+6-8,2-6...), each followed by @order where the left mesh dimension does not cut first, or P(op) "
      "with op one of sum, avg, max, min, product, bit_and, bit_or, bit_xor, \"masked op\", \"norm p\"",
      text, why));
}

Placements parse_placements(std::string_view text) {
  const std::string_view whole = trim(text);
  if (whole.size() < 2 || whole.front() != '[' || whole.back() != ']') {
    throw std::invalid_argument(
        fmt::format("parse_placements: \"{}\" is no list of placements; write e.g. [S(0), R]", text));
  }
  Placements out;
  for (const std::string_view each : split(whole.substr(1, whole.size() - 2), ','))
    out.push_back(parse_placement(each));
  return out;
}

}  // namespace tessera
