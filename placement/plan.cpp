#include "tessera/placement/plan.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <c10/util/hash.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/placement/exchange.h"
#include "tessera/placement/reduction.h"

namespace tessera {
namespace {

std::string dims_text(const PlanStep& step, const Mesh& mesh) {
  std::vector<std::string> names;
  for (const int64_t mesh_dim : step.mesh_dims) {
    names.push_back(mesh.names().empty() ? std::to_string(mesh_dim) : mesh.names()[static_cast<std::size_t>(mesh_dim)]);
  }
  return fmt::format("{}", fmt::join(names, "+"));
}

bool moves(const PlanStep& step) {
  return step.kind == PlanStep::Kind::kAllGather || step.kind == PlanStep::Kind::kAllToAll ||
         step.kind == PlanStep::Kind::kPermute;
}

// Returns the number of elements that the rank at `coordinate` receives in one step.
double received(const PlanStep& step, const std::vector<int64_t>& shape, const Mesh& mesh,
                const std::vector<int64_t>& coordinate) {
  const MergedDims dims(mesh.shape(), step.mesh_dims);
  const auto n = static_cast<double>(dims.size());
  const Tile target = local_tile(shape, step.to, mesh.shape(), coordinate);
  const auto size = static_cast<double>(numel(target));
  switch (step.kind) {
    case PlanStep::Kind::kLocal: return 0;
    case PlanStep::Kind::kAllReduce: {
      int64_t all = 0;
      for (const Tile& each : group_tiles_of(shape, step.to, mesh.shape(), dims, coordinate).tiles) all += numel(each);
      return 2 * static_cast<double>(all) * (n - 1) / n;
    }
    case PlanStep::Kind::kReduceScatter: return size * (n - 1);
    default: return size - static_cast<double>(overlap(local_tile(shape, step.from, mesh.shape(), coordinate), target));
  }
}

template <typename Visit>
void for_each_coordinate(const Mesh& mesh, const Visit& visit) {
  std::vector<int64_t> coordinate(mesh.shape().size(), 0);
  for (int64_t i = 0; i < mesh.size(); ++i) {
    visit(coordinate);
    for (std::size_t d = coordinate.size(); d-- > 0;) {
      if (++coordinate[d] < mesh.shape()[d]) break;
      coordinate[d] = 0;
    }
  }
}

}  // namespace

const char* to_string(PlanStep::Kind kind) {
  switch (kind) {
    case PlanStep::Kind::kLocal: return "local";
    case PlanStep::Kind::kAllGather: return "all_gather";
    case PlanStep::Kind::kAllToAll: return "all_to_all";
    case PlanStep::Kind::kPermute: return "permute";
    case PlanStep::Kind::kAllReduce: return "all_reduce";
    case PlanStep::Kind::kReduceScatter: return "reduce_scatter";
  }
  throw std::logic_error("to_string: not a kind of step");
}

Plan::Plan(const Mesh& mesh, std::vector<int64_t> shape, at::ScalarType dtype, std::vector<PlanStep> steps)
    : mesh_(mesh), shape_(std::move(shape)), dtype_(dtype), steps_(std::move(steps)) {
  hash_ = mesh_.hash();
  for (const int64_t size : shape_) hash_ = c10::hash_combine(hash_, static_cast<uint64_t>(size));
  hash_ = c10::hash_combine(hash_, static_cast<uint64_t>(dtype_));
  for (const PlanStep& step : steps_) {
    hash_ = c10::hash_combine(hash_, static_cast<uint64_t>(step.kind));
    for (const int64_t mesh_dim : step.mesh_dims) hash_ = c10::hash_combine(hash_, static_cast<uint64_t>(mesh_dim));
    hash_ = c10::hash_combine(hash_, hash_of(step.from));
    hash_ = c10::hash_combine(hash_, hash_of(step.to));
  }
}

bool Plan::communicates() const {
  return std::ranges::any_of(steps_, [](const PlanStep& step) { return step.kind != PlanStep::Kind::kLocal; });
}

int64_t Plan::max_bytes() const {
  int64_t sum = 0;
  for (const PlanStep& step : steps_) sum += step.max_bytes;
  return sum;
}

int64_t Plan::total_bytes() const {
  double elements = 0;
  for (const PlanStep& step : steps_) {
    for_each_coordinate(mesh_, [&](const std::vector<int64_t>& at) { elements += received(step, shape_, mesh_, at); });
  }
  return static_cast<int64_t>(elements * static_cast<double>(c10::elementSize(dtype_)) + 0.5);
}

int64_t Plan::peak_bytes() const {
  int64_t peak = 0;
  for (const PlanStep& step : steps_) peak = std::max(peak, step.peak_bytes);
  return peak;
}

double Plan::microseconds() const {
  double sum = 0;
  for (const PlanStep& step : steps_) sum += step.microseconds;
  return sum;
}

std::vector<Splits> Plan::splits(int64_t rank) const {
  const auto coordinate = mesh_.coordinate_of(rank);
  if (!coordinate) {
    throw std::invalid_argument(
        fmt::format("Plan::splits: rank {} is not on the mesh {}; give one of its ranks", rank, mesh_.to_string()));
  }
  std::vector<Splits> out;
  for (const PlanStep& step : steps_) {
    Splits& splits = out.emplace_back();
    if (!moves(step)) continue;
    const MergedDims dims(mesh_.shape(), step.mesh_dims);
    const Exchange exchange = exchange_of(shape_, step.from, step.to, mesh_.shape(), dims, *coordinate);
    const int64_t me = dims.index_of(*coordinate);
    for (int64_t i = 0; i < dims.size(); ++i) {
      const auto peer = static_cast<std::size_t>(i);
      splits.send.push_back(numel(exchange.sends[peer]));
      splits.receive.push_back(i == me ? 0 : numel(exchange.receives[peer]));
    }
  }
  return out;
}

std::string Plan::to_string() const {
  if (steps_.empty()) return "nothing to do";
  std::string out;
  for (const PlanStep& step : steps_) {
    if (!out.empty()) out += '\n';
    out += fmt::format("{}: {} -> {}",
                       step.kind == PlanStep::Kind::kLocal
                           ? std::string("local")
                           : fmt::format("{} on {}", tessera::to_string(step.kind), dims_text(step, mesh_)),
                       tessera::to_string(step.from), tessera::to_string(step.to));
    if (step.kind != PlanStep::Kind::kLocal)
      out += fmt::format(", {} bytes, {:.4g} us", step.max_bytes, step.microseconds);
  }
  return out;
}

void check_shape(const std::vector<int64_t>& shape, const std::string& who) {
  constexpr double kMostElements = 1e17;  // four times their bytes fit in 63 bits
  double elements = 1;
  for (const int64_t size : shape)
    elements *= static_cast<double>(std::max<int64_t>(size, 1));  // so that a size of 0 does not hide an overflow
  if (elements <= kMostElements && std::ranges::none_of(shape, [](int64_t size) { return size < 0; })) return;
  throw std::invalid_argument(
      fmt::format("{}: a tensor of shape [{}]; give sizes of at least 0 and at most {:.0e} elements in all", who,
                  fmt::join(shape, ", "), kMostElements));
}

void check_commute(const Placements& placements, const std::string& who) {
  if (partials_commute(placements)) return;
  throw std::invalid_argument(
      fmt::format("{}: {} has two kinds of reductions pending, whose order would matter; only sum and "
                  "avg may be pending together. Redistribute one of them to Replicate or Shard first",
                  who, tessera::to_string(placements)));
}

void check_partials(const Placements& placements, at::ScalarType dtype, const std::string& who) {
  check_commute(placements, who);
  for (const Placement& p : placements) {
    if (p.is_partial()) p.reduction().check(dtype, who);
  }
}

}  // namespace tessera
