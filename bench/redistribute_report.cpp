#include "tessera/bench/redistribute_report.h"

#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace tessera::bench {
namespace {

constexpr int64_t kLarge = 4 << 20;

using Wanted = std::function<bool(const RedistributeRow&)>;

struct Ratios {
  std::size_t rows = 0;
  double geomean = 0;
  double least = 0;
  double most = 0;
  std::string least_row, most_row;
};

Ratios ratios_of(const std::vector<RedistributeRow>& rows, double RedistributeRow::*ratio, const Wanted& wanted) {
  Ratios out;
  double logs = 0;
  for (const RedistributeRow& row : rows) {
    const double value = row.*ratio;
    if (!row.communicates || value <= 0 || !wanted(row)) continue;
    if (out.rows == 0 || value < out.least) out.least = value, out.least_row = row.of.text();
    if (out.rows == 0 || value > out.most) out.most = value, out.most_row = row.of.text();
    logs += std::log(value);
    ++out.rows;
  }
  if (out.rows > 0) out.geomean = std::exp(logs / static_cast<double>(out.rows));
  return out;
}

std::vector<std::pair<std::string, Ratios>> summary_of(const std::vector<RedistributeRow>& rows) {
  const auto all = [](const RedistributeRow&) { return true; };
  const auto shards = [](const RedistributeRow& row) { return row.of.changes_shards(); };
  const auto large = [](const RedistributeRow& row) { return row.of.bytes() >= kLarge; };
  const auto small = [](const RedistributeRow& row) { return row.of.bytes() < kLarge; };
  return {{"peer/ours", ratios_of(rows, &RedistributeRow::peer_to_ours, all)},
          {"peer/ours, Shards to Shards", ratios_of(rows, &RedistributeRow::peer_to_ours, shards)},
          {"peer/ours, from 4 MiB", ratios_of(rows, &RedistributeRow::peer_to_ours, large)},
          {"ours/raw, from 4 MiB", ratios_of(rows, &RedistributeRow::ours_to_raw, large)},
          {"ours/raw, below 4 MiB", ratios_of(rows, &RedistributeRow::ours_to_raw, small)}};
}

nlohmann::json json_of(const RedistributeRow& row) {
  nlohmann::json out = {{"name", row.of.text()},
                        {"bytes", row.of.bytes()},
                        {"communicates", row.communicates},
                        {"ours_to_raw", row.ours_to_raw}};
  const auto put = [&](const std::string& name, const Figure& f) {
    out[name + "_us"] = f.median;
    out[name + "_quartiles_us"] = {f.low, f.high};
  };
  put("ours", row.ours);
  put("raw", row.raw);
  if (row.has_peer()) {
    put("peer", row.peer);
    out["peer_to_ours"] = row.peer_to_ours;
  } else {
    out["refused"] = row.refused;
  }
  return out;
}

}  // namespace

void print_row(const RedistributeRow& row) {
  fmt::print("{:<52}{:>11.1f}{:>11.1f}{:>11}{:>9}{:>9.2f}{}\n", row.of.text(), row.ours.median, row.raw.median,
             row.has_peer() ? fmt::format("{:.1f}", row.peer.median) : "-",
             row.has_peer() ? fmt::format("{:.2f}", row.peer_to_ours) : "-", row.ours_to_raw,
             row.communicates ? "" : "  local");
  std::fflush(stdout);
}

void print_summary(const std::vector<RedistributeRow>& rows) {
  fmt::print("\nrows that communicate: geometric mean, least and most\n");
  for (const auto& [name, r] : summary_of(rows)) {
    if (r.rows == 0) continue;
    fmt::print("{:<28}{:>4} rows {:>7.2f}   {:.2f} ({})   {:.2f} ({})\n", name, r.rows, r.geomean, r.least, r.least_row,
               r.most, r.most_row);
  }
  std::map<std::string, int> refusals;
  for (const RedistributeRow& row : rows) {
    if (!row.has_peer()) ++refusals[row.refused];
  }
  for (const auto& [why, count] : refusals) fmt::print("-: the peer refused {} rows: {}\n", count, why);
}

std::vector<Goal> goals_of(const std::string& backend, const std::vector<RedistributeRow>& rows) {
  std::vector<Goal> out;
  for (const auto& [name, r] : summary_of(rows)) {
    if (r.rows == 0) continue;
    const auto want = [&, &name = name](const std::string& what, double value, bool met) {
      out.push_back({fmt::format("{} {}: {:.2f}", name, what, value), met});
    };
    const double least = backend == "mpi" ? 4 : 2;
    if (name == "peer/ours") want(fmt::format("at least {} in the mean", least), r.geomean, r.geomean >= least);
    if (name == "peer/ours" && backend != "mpi") want("at least 0.95 in every row", r.least, r.least >= 0.95);
    if (name == "peer/ours, Shards to Shards") want("at least 3 in the mean", r.geomean, r.geomean >= 3);
    if (name == "ours/raw, from 4 MiB") {
      want("at most 1.05 in the mean", r.geomean, r.geomean <= 1.05);
      want("at most 1.05 in every row", r.most, r.most <= 1.05);
    }
  }
  return out;
}

void write_redistribute_json(const std::string& path, const std::string& backend,
                             const std::vector<RedistributeRow>& rows) {
  nlohmann::json out = {{"benchmark", "redistribute"},
                        {"backend", backend},
                        {"rows", nlohmann::json::array()},
                        {"summary", nlohmann::json::array()}};
  for (const RedistributeRow& row : rows) out["rows"].push_back(json_of(row));
  for (const auto& [name, r] : summary_of(rows)) {
    out["summary"].push_back(
        {{"name", name}, {"rows", r.rows}, {"geomean", r.geomean}, {"least", r.least}, {"most", r.most}});
  }
  for (const Goal& goal : goals_of(backend, rows)) out["goals"].push_back({{"text", goal.text}, {"met", goal.met}});
  std::ofstream file(path);
  file << out.dump(2) << "\n";
  if (!file) throw std::runtime_error(fmt::format("--json: cannot write {}", path));
}

}  // namespace tessera::bench
