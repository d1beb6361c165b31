#include "tessera/bench/plan_pairs.h"

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>

#include "tessera/placement/layout.h"

namespace tessera::bench {
namespace {

// Returns a model in which the links of neighbouring mesh dimensions differ in speed; the first is the fastest or the
// slowest.
CostModel graded(int64_t mesh_ndim, double microseconds, double bytes_per_microsecond, bool first_is_fastest) {
  CostModel out;
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    const auto grade = static_cast<double>(first_is_fastest ? i + 1 : mesh_ndim - i);
    out.links.push_back({microseconds * grade, bytes_per_microsecond / grade});
  }
  return out;
}

}  // namespace

std::vector<NamedModel> models(const Mesh& mesh) {
  const int64_t n = mesh.ndim();
  return {{"bytes_only", CostModel::bytes_only(n)},
          {"gloo", CostModel::gloo(n)},
          {"nvlink_infiniband 2", CostModel::nvlink_infiniband(mesh, 2)},
          {"nvlink_infiniband 4", CostModel::nvlink_infiniband(mesh, 4)},
          {"balanced", graded(n, 10, 10, true)},
          {"bandwidth", graded(n, 0.001, 10, false)}};
}

std::vector<Placement> plain_choices() { return {Replicate(), Shard(0), Shard(1), Partial()}; }

namespace {

// Returns a partition in which the first and the last part have half of the elements each, and the others none.
Placement ragged(int64_t parts, int64_t dim, int64_t size) {
  Sizes sizes(static_cast<std::size_t>(parts), 0);
  sizes.front() = size / 2;
  sizes.back() += size - size / 2;
  return RaggedShard(dim, sizes);
}

// Returns a partition that gives single elements to parts in no regular order.
Placement lists(int64_t parts, int64_t dim, int64_t size) {
  std::vector<Intervals> out(static_cast<std::size_t>(parts));
  for (int64_t i = 0; i < size; ++i) append(out[static_cast<std::size_t>((i * i + i / 2) % parts)], {i, i + 1});
  return IntervalShard(dim, out);
}

}  // namespace

std::vector<Placement> all_choices(int64_t ranks, const Sizes& shape) {
  std::vector<Placement> out = plain_choices();
  out.push_back(Partial(ReduceOp::kMax));
  out.push_back(Partial(ReduceOp::kAvg));
  out.push_back(NormPartial(2));
  out.push_back(BlockCyclic(0, 2));
  out.push_back(BlockCyclic(1, 1));
  out.push_back(ragged(ranks, 0, shape[0]));
  out.push_back(lists(ranks, 1, shape[1]));
  out.push_back(Shard(0).ordered(1));
  out.push_back(Shard(1).ordered(1));
  return out;
}

std::vector<Placement> uneven_choices(int64_t ranks, const Sizes& shape, bool with_lists) {
  std::vector<Placement> out = plain_choices();
  out.push_back(ragged(ranks, 0, shape[0]));
  if (!with_lists) return out;
  out.push_back(BlockCyclic(0, 2));
  out.push_back(lists(ranks, 1, shape[1]));
  return out;
}

std::vector<Placements> joint_layouts(const Mesh& mesh, const Sizes& shape) {
  const std::size_t ndim = mesh.shape().size();
  return {Placements(ndim, ragged(mesh.size(), 1, shape[1])), Placements(ndim, lists(mesh.size(), 0, shape[0]))};
}

namespace {

// Returns the layout in its normal form, or nothing if it does not fit mesh and tensor or its reductions do not
// commute.
std::optional<Placements> fitting(const Mesh& mesh, const Sizes& shape, const Placements& written) {
  try {
    Placements out = normalize(written, mesh, static_cast<int64_t>(shape.size()), "plan_quality");
    check_layout(out, mesh, shape, "plan_quality");
    return partials_commute(out) ? std::optional(std::move(out)) : std::nullopt;
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
}

}  // namespace

std::vector<Placements> layouts(const Mesh& mesh, const Sizes& shape,
                                const std::function<std::vector<Placement>(int64_t)>& choices_of,
                                const std::vector<Placements>& more) {
  std::vector<Placements> all = {{}};
  for (const int64_t ranks : mesh.shape()) {
    std::vector<Placements> longer;
    for (const Placements& before : all) {
      for (const Placement& choice : choices_of(ranks)) {
        longer.push_back(before);
        longer.back().push_back(choice);
      }
    }
    all = std::move(longer);
  }
  all.insert(all.end(), more.begin(), more.end());
  std::map<std::string, Placements> out;
  for (const Placements& written : all) {
    if (const auto placements = fitting(mesh, shape, written)) out.emplace(to_string(*placements), *placements);
  }
  std::vector<Placements> list;
  for (const auto& [text, placements] : out) list.push_back(placements);
  return list;
}

std::vector<Pair> pairs(const std::vector<Placements>& layouts, std::size_t most, uint64_t seed) {
  std::vector<Pair> out;
  if (most == 0 || layouts.size() * layouts.size() <= most) {
    for (const Placements& from : layouts) {
      for (const Placements& to : layouts) out.emplace_back(from, to);
    }
    return out;
  }
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < most; ++i) {
    const std::size_t from = random() % layouts.size();
    out.emplace_back(layouts[from], layouts[random() % layouts.size()]);
  }
  return out;
}

std::vector<Pair> drawn_pairs(const Mesh& mesh, const Sizes& shape,
                              const std::function<std::vector<Placement>(int64_t)>& choices_of, std::size_t count,
                              uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto draw = [&](std::size_t i) {
    const std::vector<Placement> choices = choices_of(mesh.shape()[i]);
    return choices[random() % choices.size()];
  };
  std::vector<Pair> out;
  while (out.size() < count) {
    Placements from, to;
    for (std::size_t i = 0; i < mesh.shape().size(); ++i) {
      from.push_back(draw(i));
      to.push_back(random() % 2 == 0 ? from.back() : draw(i));
    }
    const auto source = fitting(mesh, shape, from);
    const auto target = fitting(mesh, shape, to);
    if (source && target && *source != *target) out.emplace_back(*source, *target);
  }
  return out;
}

void Ratios::add(double cost, double least) {
  if (least <= 0) {
    for_nothing_ += cost > 0;
    return;
  }
  ++count_;
  sum_of_logs_ += std::log(std::max(cost / least, 1e-9));
  worst_ = std::max(worst_, cost / least);
}

}  // namespace tessera::bench
