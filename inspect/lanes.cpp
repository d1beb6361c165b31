#include "tessera/inspect/lanes.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

namespace tessera {
namespace {

bool is_before(const LaneSlice& a, const LaneSlice& b) {
  return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
}

// Returns "layers.0.up" for the parameter "layers.0.up.weight", and "" for one of the root.
std::string module_of(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

// Returns a slice for each run of operators that used parameters of one module. `operators` ascend.
std::vector<LaneSlice> module_slices(const std::vector<LaneSlice>& operators, const std::vector<Record>& records) {
  std::vector<LaneSlice> out;
  bool goes_on = false;  // the last slice may be continued
  for (const LaneSlice& each : operators) {
    const std::string module = module_of(records[static_cast<std::size_t>(each.record)].path);
    if (module.empty()) {
      goes_on = false;
    } else if (goes_on && out.back().name == module) {
      out.back().end_ns = std::max(out.back().end_ns, each.end_ns);
      out.back().is_open = out.back().is_open || each.is_open;
    } else {
      out.push_back({.name = module, .begin_ns = each.begin_ns, .end_ns = each.end_ns, .is_open = each.is_open});
      goes_on = true;
    }
  }
  return out;
}

// Puts slices into as few lanes as keep the invariant of Lane, the first called `name`.
std::vector<Lane> packed(int64_t rank, const std::string& name, RecordKind kind, std::vector<LaneSlice> slices) {
  std::stable_sort(slices.begin(), slices.end(), is_before);
  std::vector<Lane> lanes;
  std::vector<std::vector<int64_t>> open;  // per lane, the ends of the slices around the next one
  const auto fits = [&](std::vector<int64_t>& ends, const LaneSlice& slice) {
    while (!ends.empty() && ends.back() <= slice.begin_ns) ends.pop_back();
    return ends.empty() || (kind != RecordKind::kCollective && slice.end_ns <= ends.back());
  };
  for (LaneSlice& slice : slices) {
    std::size_t i = 0;
    while (i < lanes.size() && !fits(open[i], slice)) ++i;
    if (i == lanes.size()) {
      lanes.push_back(
          {.rank = rank, .name = i == 0 ? name : fmt::format("{} ({})", name, i + 1), .kind = kind, .slices = {}});
      open.emplace_back();
    }
    open[i].push_back(slice.end_ns);
    lanes[i].slices.push_back(std::move(slice));
  }
  return lanes;
}

// Collects the slices of one rank.
struct OfRank {
  std::vector<LaneSlice> spans, modules, operators;
  std::vector<std::pair<std::string, std::vector<LaneSlice>>> collectives;  // by mesh dimension
  int64_t last_ns = 0;

  std::vector<LaneSlice>& of(const Record& record) {
    switch (record.kind) {
      case RecordKind::kOperator: return operators;
      case RecordKind::kModule: return modules;
      case RecordKind::kSpan: return spans;
      case RecordKind::kCollective: break;
    }
    const auto found =
        std::ranges::find_if(collectives, [&](const auto& each) { return each.first == record.mesh_dim; });
    if (found != collectives.end()) return found->second;
    return collectives.emplace_back(record.mesh_dim, std::vector<LaneSlice>()).second;
  }
};

}  // namespace

std::vector<Lane> lanes_of(const std::vector<Record>& records) {
  std::map<int64_t, OfRank> ranks;
  for (const Record& record : records) {
    int64_t& last = ranks[record.rank].last_ns;
    last = std::max({last, record.begin_ns, record.waited_from_ns, record.end_ns});
  }
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Record& record = records[i];
    OfRank& here = ranks[record.rank];
    here.of(record).push_back({.name = record.name,
                               .begin_ns = record.begin_ns,
                               .end_ns = record.has_ended() ? record.end_ns : here.last_ns,
                               .record = static_cast<int64_t>(i),
                               .is_open = !record.has_ended()});
  }
  std::vector<Lane> lanes;
  for (auto& [rank, here] : ranks) {
    const auto add = [&, rank = rank](const std::string& name, RecordKind kind, std::vector<LaneSlice> slices) {
      for (Lane& lane : packed(rank, name, kind, std::move(slices))) lanes.push_back(std::move(lane));
    };
    std::stable_sort(here.operators.begin(), here.operators.end(), is_before);
    for (LaneSlice& each : module_slices(here.operators, records)) here.modules.push_back(std::move(each));
    add("spans", RecordKind::kSpan, std::move(here.spans));
    add("modules", RecordKind::kModule, std::move(here.modules));
    add("operators", RecordKind::kOperator, std::move(here.operators));
    for (auto& [mesh_dim, slices] : here.collectives) {
      add("collectives on " + mesh_dim, RecordKind::kCollective, std::move(slices));
    }
  }
  return lanes;
}

}  // namespace tessera
