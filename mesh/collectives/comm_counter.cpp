#include "tessera/mesh/collectives/comm_counter.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace tessera {
namespace {

struct Line {
  CollectiveRecord record;  // its bytes are the sum
  int64_t count = 0;
};

bool same_line(const CollectiveRecord& a, const CollectiveRecord& b) {
  return std::string_view(a.kind) == b.kind && a.mesh_dim == b.mesh_dim && a.op == b.op && a.path == b.path;
}

std::vector<Line> group_by_line(const std::vector<CollectiveRecord>& records) {
  std::vector<Line> lines;
  for (const CollectiveRecord& record : records) {
    const auto found =
        std::find_if(lines.begin(), lines.end(), [&](const Line& line) { return same_line(line.record, record); });
    if (found == lines.end()) {
      lines.push_back({.record = record, .count = 1});
      continue;
    }
    ++found->count;
    found->record.bytes += record.bytes;
  }
  return lines;
}

template <typename Condition>
int64_t count_where(const std::vector<CollectiveRecord>& records, const Condition& condition) {
  return std::count_if(records.begin(), records.end(), condition);
}

}  // namespace

CommCounter::CommCounter(const DeviceMesh& mesh) : CommCounter(mesh.world()) {}

CommCounter::CommCounter(World& world)
    : records_(std::make_shared<std::vector<CollectiveRecord>>()),
      token_(world.observe([records = records_](const CollectiveRecord& record) { records->push_back(record); })) {}

int64_t CommCounter::total() const { return static_cast<int64_t>(records_->size()); }

int64_t CommCounter::total_bytes() const {
  int64_t sum = 0;
  for (const CollectiveRecord& record : *records_) sum += record.bytes;
  return sum;
}

int64_t CommCounter::count(std::string_view kind) const {
  return count_where(*records_, [&](const CollectiveRecord& record) { return record.kind == kind; });
}

int64_t CommCounter::bytes(std::string_view kind) const {
  int64_t sum = 0;
  for (const CollectiveRecord& record : *records_) sum += record.kind == kind ? record.bytes : 0;
  return sum;
}

int64_t CommCounter::count_on(std::string_view mesh_dim) const {
  return count_where(*records_, [&](const CollectiveRecord& record) { return record.mesh_dim == mesh_dim; });
}

int64_t CommCounter::count_by_op(std::string_view op) const {
  return count_where(*records_, [&](const CollectiveRecord& record) { return record.op == op; });
}

int64_t CommCounter::count_by_path(std::string_view path) const {
  return count_where(*records_, [&](const CollectiveRecord& record) { return record.path == path; });
}

const std::vector<CollectiveRecord>& CommCounter::records() const { return *records_; }

void CommCounter::reset() { records_->clear(); }

std::string CommCounter::to_string() const {
  const std::vector<Line> lines = group_by_line(*records_);
  std::array<std::size_t, 3> widths = {4, 8, 8};
  for (const Line& line : lines) {
    widths[0] = std::max(widths[0], std::string_view(line.record.kind).size());
    widths[1] = std::max(widths[1], line.record.mesh_dim.size());
    widths[2] = std::max(widths[2], line.record.op.size());
  }
  std::string text = fmt::format("{:<{}}  {:<{}}  {:>5}  {:>12}  {:<{}}  path\n", "kind", widths[0], "mesh dim",
                                 widths[1], "count", "bytes", "operator", widths[2]);
  for (const Line& line : lines) {
    text += fmt::format("{:<{}}  {:<{}}  {:>5}  {:>12}  {:<{}}  {}\n", line.record.kind, widths[0],
                        line.record.mesh_dim, widths[1], line.count, line.record.bytes,
                        line.record.op.empty() ? "-" : line.record.op, widths[2], line.record.path);
  }
  return text;
}

}  // namespace tessera
