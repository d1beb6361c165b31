#include "tessera/inspect/trace.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/ApproximateClock.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/inspect/clock_offset.h"
#include "tessera/inspect/lanes.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/failing.h"
#include "tessera/mesh/record_file.h"
#include "tessera/mesh/values_on_host.h"

namespace tessera {
namespace {

constexpr int64_t kBarriers = 8;
constexpr const char* kOp = "write_trace";

DeviceMesh as_one_dimension(const DeviceMesh& mesh) {
  std::vector<int64_t> all(static_cast<std::size_t>(mesh.ndim()));
  std::iota(all.begin(), all.end(), int64_t{0});
  return mesh.merged(all);
}

std::vector<int64_t> gather_numbers(const std::vector<int64_t>& mine, const DeviceMesh& mesh) {
  const at::Tensor all =
      values_on_host(all_gather(at::tensor(mine, at::kLong).to(mesh.device()).unsqueeze(0), mesh, 0), mesh.world())
          .contiguous();
  const auto* const begin = all.const_data_ptr<int64_t>();
  return {begin, begin + all.numel()};
}

// Returns how far the clock of each rank is ahead of the first rank's.
std::vector<int64_t> clock_offsets(const DeviceMesh& mesh) {
  std::vector<int64_t> mine;
  for (int64_t i = 0; i < kBarriers; ++i) {
    mine.push_back(c10::getTime());
    barrier(mesh, 0);
    mine.push_back(c10::getTime());
  }
  const std::vector<int64_t> all = gather_numbers(mine, mesh);
  std::vector<std::vector<BarrierTimes>> times(static_cast<std::size_t>(mesh.size()));
  for (std::size_t i = 0; i < all.size(); i += 2) times[i / mine.size()].push_back({all[i], all[i + 1]});
  std::vector<int64_t> out;
  out.reserve(times.size());
  for (const auto& each : times) out.push_back(clock_offset(times.front(), each));
  return out;
}

// Sends each rank's bytes to the first rank, which returns one string per rank.
std::vector<std::vector<uint8_t>> gather_bytes(const std::vector<uint8_t>& mine, const DeviceMesh& mesh) {
  const std::vector<int64_t> sizes = gather_numbers({static_cast<int64_t>(mine.size())}, mesh);
  at::Tensor sent = at::empty({static_cast<int64_t>(mine.size())}, at::kByte);
  std::memcpy(sent.mutable_data_ptr(), mine.data(), mine.size());
  std::vector<int64_t> counts(sizes.size(), 0), received(sizes.size(), 0);
  counts.front() = sent.numel();
  if (mesh.local_rank(0) == 0) received = sizes;
  const at::Tensor all = values_on_host(all_to_all(sent.to(mesh.device()), counts, received, mesh, 0), mesh.world());
  std::vector<std::vector<uint8_t>> out;
  const auto* next = static_cast<const uint8_t*>(all.const_data_ptr());
  for (const int64_t size : received) {
    out.emplace_back(next, next + size);
    next += size;
  }
  return out;
}

void move_times(std::vector<Record>& records, int64_t by) {
  for (Record& r : records) {
    for (int64_t* const time : {&r.begin_ns, &r.end_ns, &r.waited_from_ns}) *time += *time == 0 ? 0 : by;
  }
}

// ---- Chrome's format
// -------------------------------------------------------------------------------------------------

nlohmann::json metadata(const char* what, int64_t pid, int64_t tid, nlohmann::json args) {
  return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", std::move(args)}};
}

double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

nlohmann::json arguments(const Record& r) {
  nlohmann::json out = nlohmann::json::object();
  if (!r.path.empty()) out["path"] = r.path;
  if (!r.op.empty()) out["operator"] = r.op;
  if (!r.has_ended()) out["has ended"] = false;
  if (r.kind != RecordKind::kCollective) return out;
  out["bytes"] = r.bytes;
  out["mesh dimension"] = r.mesh_dim;
  out["ranks"] = fmt::format("{}", fmt::join(r.ranks, ", "));
  out["number"] = r.serial;
  if (r.has_ended() && r.waited_from_ns != 0) out["waited us"] = microseconds(r.end_ns - r.waited_from_ns);
  return out;
}

void add_lane(nlohmann::json& events, const Lane& lane, int64_t tid, const std::vector<Record>& records,
              int64_t origin) {
  events.push_back(metadata("thread_name", lane.rank, tid, {{"name", lane.name}}));
  events.push_back(metadata("thread_sort_index", lane.rank, tid, {{"sort_index", tid}}));
  for (const LaneSlice& slice : lane.slices) {
    nlohmann::json event = {{"ph", "X"},
                            {"name", slice.name},
                            {"cat", to_string(lane.kind)},
                            {"pid", lane.rank},
                            {"tid", tid},
                            {"ts", microseconds(slice.begin_ns - origin)},
                            {"dur", microseconds(slice.end_ns - slice.begin_ns)}};
    if (slice.record >= 0) event["args"] = arguments(records[static_cast<std::size_t>(slice.record)]);
    events.push_back(std::move(event));
  }
}

// Returns the number of each rank's first record.
std::map<int64_t, uint64_t> first_sequences(const std::vector<Record>& records) {
  std::map<int64_t, uint64_t> first;
  for (const Record& record : records) {
    const auto [known, is_new] = first.emplace(record.rank, record.sequence);
    if (!is_new) known->second = std::min(known->second, record.sequence);
  }
  return first;
}

std::string process_name(int64_t rank, uint64_t first) {
  return first > 1 ? fmt::format("rank {}, from its record {} on", rank, first) : fmt::format("rank {}", rank);
}

}  // namespace

std::vector<Record> gather_records(const DeviceMesh& given) {
  if (!given.is_member()) return {};
  std::vector<Record> mine = given.world().recorder().records();
  if (given.size() == 1 || given.world().is_fake()) return mine;
  const World::Scope scope(given.world(), kOp);
  const DeviceMesh mesh = as_one_dimension(given);
  const std::vector<int64_t> offsets = clock_offsets(mesh);
  // This rank alone may lack the memory for what it encodes or decodes, while the others go on to a collective.
  const std::vector<uint8_t> sent = failing(given.world(), kOp, [&] { return encode_records(mine); });
  const std::vector<std::vector<uint8_t>> all = gather_bytes(sent, mesh);
  if (mesh.local_rank(0) != 0) return {};
  return failing(given.world(), kOp, [&] {
    std::vector<Record> out;
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::vector<Record> records = decode_records(all[i], mesh.mesh().ranks()[i]);
      move_times(records, -offsets[i]);
      for (Record& record : records) out.push_back(std::move(record));
    }
    return out;
  });
}

std::string chrome_trace(const std::vector<Record>& records) {
  int64_t origin = records.empty() ? 0 : records.front().begin_ns;
  for (const Record& record : records) origin = std::min(origin, record.begin_ns);
  nlohmann::json events = nlohmann::json::array();
  int64_t tid = 0;
  const std::map<int64_t, uint64_t> first = first_sequences(records);
  const std::vector<Lane> lanes = lanes_of(records);
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const int64_t rank = lanes[i].rank;
    if (i == 0 || lanes[i - 1].rank != rank) {
      tid = 0;
      events.push_back(metadata("process_name", rank, 0, {{"name", process_name(rank, first.at(rank))}}));
      events.push_back(metadata("process_sort_index", rank, 0, {{"sort_index", rank}}));
    }
    add_lane(events, lanes[i], ++tid, records, origin);
  }
  nlohmann::json trace = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  if (!records.empty()) trace["otherData"]["begins at"] = utc_text(origin);
  return trace.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void write_trace(const DeviceMesh& mesh, const std::string& path) {
  if (!mesh.is_member()) return;
  const std::vector<Record> records = gather_records(mesh);
  Agreement({mesh}, kOp).run([&] {
    // In a fake world each rank is alone, and has its own records.
    if (mesh.world().rank() != mesh.mesh().ranks().front() && !mesh.world().is_fake()) return;
    const std::string trace = chrome_trace(records);
    AtomicFile file(path);
    file.write(trace.data(), static_cast<int64_t>(trace.size()));
    file.sync();
    file.publish();
    sync_folder(folder_of(path));
  });
}

std::vector<CollectiveTotal> collective_totals(const std::vector<Record>& records) {
  std::vector<CollectiveTotal> totals;
  for (const Record& r : records) {
    if (r.kind != RecordKind::kCollective || !r.has_ended()) continue;
    auto total = std::ranges::find_if(
        totals, [&](const CollectiveTotal& t) { return t.name == r.name && t.mesh_dim == r.mesh_dim; });
    if (total == totals.end()) total = totals.insert(total, {.name = r.name, .mesh_dim = r.mesh_dim});
    ++total->count;
    total->bytes += r.bytes;
    total->in_flight_ns += r.end_ns - r.begin_ns;
    total->waited_ns += r.waited_from_ns == 0 ? 0 : r.end_ns - r.waited_from_ns;
  }
  return totals;
}

std::string to_string(const std::vector<CollectiveTotal>& totals) {
  std::string text = fmt::format("{:<14}  {:<8}  {:>7}  {:>14}  {:>12}  {:>10}\n", "kind", "mesh dim", "count", "bytes",
                                 "ms in flight", "ms waited");
  for (const CollectiveTotal& t : totals) {
    text += fmt::format("{:<14}  {:<8}  {:>7}  {:>14}  {:>12.3f}  {:>10.3f}\n", t.name, t.mesh_dim, t.count, t.bytes,
                        static_cast<double>(t.in_flight_ns) / 1e6, static_cast<double>(t.waited_ns) / 1e6);
  }
  return text;
}

}  // namespace tessera
