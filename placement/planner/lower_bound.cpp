#include <algorithm>
#include <numeric>

#include "tessera/placement/exchange.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/byte_bounds.h"
#include "tessera/placement/planner/plan_redistribute.h"

namespace tessera {
namespace {

// Counts, rank by rank, the elements of their target tiles that ranks do not hold. Of a pending value a rank holds
// terms.
struct MissingElements {
  double most = 0;     // of the rank that misses most
  double held = 0;     // summed over all ranks: the elements that they hold
  double wanted = 0;   // summed over all ranks: the elements of their target tiles
  double largest = 0;  // the largest target tile
};

MissingElements count_missing(const std::vector<int64_t>& shape, const Mesh& mesh, const Placements& from,
                              const Placements& to) {
  MissingElements out;
  std::vector<int64_t> every(mesh.shape().size());
  std::iota(every.begin(), every.end(), 0);
  const MergedDims ranks(mesh.shape(), every);
  for (int64_t i = 0; i < ranks.size(); ++i) {
    const std::vector<int64_t> at = ranks.coordinate_of(std::vector<int64_t>(every.size()), i);
    const Tile target = local_tile(shape, to, mesh.shape(), at);
    const auto wanted = static_cast<double>(numel(target));
    const auto held = static_cast<double>(overlap(local_tile(shape, from, mesh.shape(), at), target));
    out.most = std::max(out.most, wanted - held);
    out.held += held;
    out.wanted += wanted;
    out.largest = std::max(out.largest, wanted);
  }
  return out;
}

// Returns the number of ranks along the mesh dimensions for which `condition` holds.
template <typename Condition>
double ranks_where(const Mesh& mesh, const Condition& condition) {
  double out = 1;
  for (std::size_t i = 0; i < mesh.shape().size(); ++i) out *= condition(i) ? static_cast<double>(mesh.shape()[i]) : 1;
  return out;
}

}  // namespace

LowerBound lower_bound(const std::vector<int64_t>& shape, at::ScalarType dtype, const Mesh& mesh,
                       const Placements& from, const Placements& to) {
  check_shape(shape, "lower_bound");
  const auto legal = [&](const Placements& written) {
    Placements out = normalize(written, mesh, static_cast<int64_t>(shape.size()), "lower_bound");
    check_layout(out, mesh, shape, "lower_bound");
    return out;
  };
  const MissingElements missing = count_missing(shape, mesh, legal(from), legal(to));
  const auto copied = [&](std::size_t i) { return to[i].is_partial() && from[i].is_replicate(); };
  const auto new_copies = [&](std::size_t i) { return to[i].is_replicate() && !from[i].is_replicate(); };
  Ends ends{
      .terms = ranks_where(mesh, [&](std::size_t i) { return from[i].is_partial(); }),
      .pieces_per_element = ranks_where(mesh, [&](std::size_t i) { return to[i].is_partial(); }),
      .copies = ranks_where(mesh, [&](std::size_t i) { return to[i].is_replicate(); }),
      .held = missing.held,
      .reachable = missing.held / ranks_where(mesh, copied),
      .new_copies = ranks_where(mesh, new_copies) > 1,
  };
  ends.elements = missing.wanted / (ends.copies * ends.pieces_per_element);
  const double total = least_received(ends);
  double most = total / static_cast<double>(mesh.size());
  if (ends.pieces_per_element == 1) most = std::max(most, ends.terms == 1 ? missing.most : missing.largest);
  const auto width = static_cast<double>(c10::elementSize(dtype));
  return {.max_bytes = static_cast<int64_t>(most * width + 0.5),
          .total_bytes = static_cast<int64_t>(total * width + 0.5)};
}

}  // namespace tessera
