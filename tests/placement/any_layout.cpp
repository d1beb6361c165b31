#include "tessera/tests/placement/any_layout.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ostream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/plan.h"

namespace tessera::testing {
namespace {

// Holds numbers that give a placement for every choice, so that RapidCheck may make each of them smaller by itself.
struct Draft {
  int kind = 0;
  int pending = 0;
  int tensor_dim = 0;
  int order = 0;
  bool joint = false;        // of RaggedShard and IntervalShard: cut over all mesh dimensions that have it
  std::vector<int> numbers;  // eight numbers of 0 to 9
};

struct Drafts {
  int mesh_ndim = 1;
  std::vector<int> mesh_sizes;
  int ndim = 0;
  std::vector<int> sizes;
  int dtype = 0;
  std::vector<Draft> from;
  std::vector<Draft> to;
};

enum Kind { kReplicate, kChunks, kMoreChunks, kRagged, kIntervals, kBlocks, kPending, kMorePending, kKinds };

// Draws from the whole range, whatever the number of the example is.
rc::Gen<int> below(int end, int begin = 0) { return rc::gen::resize(rc::kNominalSize, rc::gen::inRange(begin, end)); }

rc::Gen<Draft> drafts() {
  using rc::gen::set;
  return rc::gen::build<Draft>(set(&Draft::kind, below(kKinds)), set(&Draft::pending, below(10)),
                               set(&Draft::tensor_dim, below(3)), set(&Draft::order, below(3)), set(&Draft::joint),
                               set(&Draft::numbers, rc::gen::container<std::vector<int>>(8, below(10))));
}

Placement pending(int number) {
  const auto i = static_cast<std::size_t>(number);
  if (i < std::size(kPlainReductions)) return Partial(kPlainReductions[i]);
  return i % 2 == 0 ? NormPartial(2) : MaskedPartial();
}

std::vector<int64_t> ragged_sizes(const std::vector<int>& numbers, int64_t size, int64_t parts) {
  std::vector<int64_t> out;
  int64_t left = size;
  for (int64_t i = 0; i + 1 < parts; ++i) {
    out.push_back(std::min<int64_t>(left, numbers[static_cast<std::size_t>(i) % numbers.size()] / 2));
    left -= out.back();
  }
  out.push_back(left);
  return out;
}

std::vector<Intervals> dealt(const std::vector<int>& numbers, int64_t size, int64_t parts) {
  std::vector<Intervals> out(static_cast<std::size_t>(parts));
  for (int64_t i = 0; i < size; ++i) {
    const int part = numbers[static_cast<std::size_t>(i) % numbers.size()] % static_cast<int>(parts);
    append(out[static_cast<std::size_t>(part)], {.begin = i, .end = i + 1});
  }
  return out;
}

// Returns a Shard that cuts `size` elements into `parts`.
Placement shard_of(const Draft& draft, int64_t tensor_dim, int64_t size, int64_t parts) {
  switch (draft.kind) {
    case kRagged: return RaggedShard(tensor_dim, ragged_sizes(draft.numbers, size, parts));
    case kIntervals: return IntervalShard(tensor_dim, dealt(draft.numbers, size, parts));
    case kBlocks: return BlockCyclic(tensor_dim, 1 + draft.numbers[0] % 4);
    default: return Shard(tensor_dim);
  }
}

bool is_legal(const Placements& placements, const Mesh& mesh, const std::vector<int64_t>& shape, at::ScalarType dtype) {
  try {
    check_partials(placements, dtype, "test");
  } catch (const std::invalid_argument&) {
    return false;
  }
  return is_layout(placements, mesh, shape);
}

// Builds the layout that `drafts` describe, with Replicate instead of placements that are impossible.
class Layout {
 public:
  Layout(const Mesh& mesh, const std::vector<int64_t>& shape, at::ScalarType dtype, const std::vector<Draft>& drafts)
      : mesh_(mesh), shape_(shape), drafts_(drafts), made_(mesh.shape().size()) {
    for (std::size_t i = 0; i < made_.size(); ++i) made_[i] = at(i);
    for (std::size_t i = made_.size(); i-- > 0 && !is_legal(made_, mesh, shape, dtype);) made_[i] = Replicate();
    made_ = normalize(made_, mesh, static_cast<int64_t>(shape.size()), "test");
  }
  const Placements& placements() const { return made_; }

 private:
  bool joins(const Draft& a, const Draft& b) const {
    return a.joint && b.joint && a.kind == b.kind && (a.kind == kRagged || a.kind == kIntervals) && dim(a) == dim(b);
  }
  int64_t dim(const Draft& draft) const { return draft.tensor_dim % static_cast<int64_t>(shape_.size()); }

  // Returns the placement of mesh dimension i, after those before it were made.
  Placement at(std::size_t i) const {
    const Draft& draft = drafts_[i];
    if (draft.kind >= kPending) return pending(draft.pending);
    if (draft.kind == kReplicate || shape_.empty()) return Replicate();
    int64_t parts = 1;
    for (std::size_t j = 0; j < made_.size(); ++j) {
      if (j != i && !joins(drafts_[j], draft)) continue;
      if (j < i) return made_[j].is_shard() ? made_[j].ordered(draft.order) : Replicate();
      parts *= mesh_.shape()[j];
    }
    const std::vector<int64_t> first(made_.size(), 0);
    const int64_t left = local_shape(shape_, made_, mesh_.shape(), first)[static_cast<std::size_t>(dim(draft))];
    return shard_of(draft, dim(draft), left, parts).ordered(draft.order);
  }

  const Mesh& mesh_;
  const std::vector<int64_t>& shape_;
  const std::vector<Draft>& drafts_;
  Placements made_;
};

std::vector<int64_t> mesh_shape_of(const Drafts& drafts) {
  constexpr std::array<int64_t, 3> kMost = {8, 4, 3};
  const int64_t most = kMost[static_cast<std::size_t>(drafts.mesh_ndim) - 1];
  std::vector<int64_t> out;
  int64_t ranks = 1;
  for (int i = 0; i < drafts.mesh_ndim; ++i) {
    out.push_back(std::min(1 + drafts.mesh_sizes[static_cast<std::size_t>(i)] % most, 8 / ranks));
    ranks *= out.back();
  }
  return out;
}

Change change_of(const Drafts& drafts) {
  constexpr std::array kDtypes = {at::kDouble, at::kLong, at::kBool};
  Change out;
  out.mesh_shape = mesh_shape_of(drafts);
  out.shape.assign(drafts.sizes.begin(), drafts.sizes.begin() + drafts.ndim);
  out.dtype = kDtypes[static_cast<std::size_t>(drafts.dtype)];
  const Mesh mesh(out.mesh_shape);
  out.from = Layout(mesh, out.shape, out.dtype, drafts.from).placements();
  out.to = Layout(mesh, out.shape, out.dtype, drafts.to).placements();
  return out;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Change& change) {
  return out << fmt::format("{} -> {} of {} [{}] on a mesh of ({})", to_string(change.from), to_string(change.to),
                            c10::toString(change.dtype), fmt::join(change.shape, ", "),
                            fmt::join(change.mesh_shape, ", "));
}

rc::Gen<Change> any_change() {
  using rc::gen::set;
  const auto layout = rc::gen::container<std::vector<Draft>>(3, drafts());
  return rc::gen::map(
      rc::gen::build<Drafts>(set(&Drafts::mesh_ndim, below(4, 1)),
                             set(&Drafts::mesh_sizes, rc::gen::container<std::vector<int>>(3, below(24))),
                             set(&Drafts::ndim, below(4)),
                             set(&Drafts::sizes, rc::gen::container<std::vector<int>>(3, below(10))),
                             set(&Drafts::dtype, below(3)), set(&Drafts::from, layout), set(&Drafts::to, layout)),
      change_of);
}

rc::Gen<Placement> any_placement() {
  return rc::gen::map(rc::gen::tuple(drafts(), below(9), below(9, 1)), [](const std::tuple<Draft, int, int>& drawn) {
    const auto& [draft, size, parts] = drawn;
    if (draft.kind >= kPending) return pending(draft.pending);
    if (draft.kind == kReplicate) return Replicate();
    return shard_of(draft, draft.tensor_dim - 1, size, parts).ordered(draft.order);
  });
}

void fix_seed() { ::setenv("RC_PARAMS", "seed=20260105 max_success=1000", /*overwrite=*/0); }

}  // namespace tessera::testing
