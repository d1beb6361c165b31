#include "tessera/bench/redistribute_cases.h"

#include <sstream>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera::bench {
namespace {

using Pair = std::pair<Placements, Placements>;

Placements placements_of(const std::string& words) {
  Placements out;
  std::istringstream in(words);
  for (std::string word; in >> word;) out.push_back(parse_placement(word));
  return out;
}

std::vector<int64_t> numbers_of(const std::string& list) {
  std::vector<int64_t> out;
  std::istringstream in(list);
  for (std::string number; std::getline(in, number, ',');) out.push_back(std::stoll(number));
  return out;
}

std::string words_of(const Placements& placements) {
  std::string out;
  for (const Placement& each : placements) out += (out.empty() ? "" : " ") + to_string(each);
  return out;
}

std::vector<Pair> pairs_1d() {
  const std::vector<std::string> all = {"S(0)", "S(1)", "R", "P(sum)"};
  std::vector<Pair> out;
  for (const std::string& from : all) {
    for (const std::string& to : all) {
      if (from != to) out.emplace_back(placements_of(from), placements_of(to));
    }
  }
  return out;
}

std::vector<Pair> pairs_2d() {
  const std::vector<std::pair<const char*, const char*>> texts = {
      {"S(0) S(0)", "R R"},        {"S(0) S(1)", "S(1) S(0)"},     {"S(0) R", "R S(0)"},    {"P(sum) P(sum)", "R R"},
      {"P(sum) P(sum)", "R S(0)"}, {"P(sum) P(sum)", "S(0) S(0)"}, {"R S(0)", "S(0) S(1)"}, {"S(0) S(0)", "S(1) S(1)"},
      {"S(0) P(sum)", "R R"},      {"S(0) P(sum)", "S(0) S(1)"},   {"R R", "S(0) S(1)"},    {"S(1) S(0)", "R R"}};
  std::vector<Pair> out;
  for (const auto& [from, to] : texts) out.emplace_back(placements_of(from), placements_of(to));
  return out;
}

}  // namespace

int64_t RedistributeCase::bytes() const {
  int64_t out = 4;
  for (const int64_t size : shape) out *= size;
  return out;
}

bool RedistributeCase::changes_shards() const {
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (!from[i].is_shard() || !to[i].is_shard()) return false;
  }
  return true;
}

std::string RedistributeCase::text() const {
  return fmt::format("{};{};{};{}", fmt::join(mesh, ","), fmt::join(shape, ","), words_of(from), words_of(to));
}

RedistributeCase RedistributeCase::parse(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ';');) parts.push_back(part);
  if (parts.size() != 4) throw std::invalid_argument(fmt::format("{} is not MESH;SHAPE;FROM;TO", text));
  return {.mesh = numbers_of(parts[0]),
          .shape = numbers_of(parts[1]),
          .from = placements_of(parts[2]),
          .to = placements_of(parts[3])};
}

std::vector<RedistributeCase> redistribute_cases(int64_t ranks, const std::vector<int64_t>& sizes) {
  std::vector<RedistributeCase> out;
  const auto add = [&](const std::vector<int64_t>& mesh, const std::vector<Pair>& pairs) {
    for (const int64_t n : sizes) {
      for (const std::vector<int64_t>& shape : {std::vector<int64_t>{n, n}, {n - 1, n + 1}}) {
        for (const auto& [from, to] : pairs) out.push_back({.mesh = mesh, .shape = shape, .from = from, .to = to});
      }
    }
  };
  add({ranks}, pairs_1d());
  if (ranks == 4) add({2, 2}, pairs_2d());
  return out;
}

}  // namespace tessera::bench
