// Runs PyTorch's own cases 14 to 19, about layouts and redistribution, which tests/dtensor/cases_test.cpp does not
// have.

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/placement/layout.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/placement/short_names.h"
#include "tessera/tests/pytorch_cases/beside_plain.h"

namespace tessera::testing {
namespace {

// Returns this rank's part of `t` along dimension 0, split as torch.chunk does by those mesh dimensions in turn.
at::Tensor chunked(at::Tensor t, const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims) {
  for (const int64_t d : mesh_dims) {
    const std::vector<at::Tensor> chunks = t.chunk(mesh.size(d));
    const auto i = static_cast<std::size_t>(mesh.local_rank(d));
    t = i < chunks.size() ? chunks[i] : t.narrow(0, 0, 0);
  }
  return t;
}

}  // namespace

TEST_CASE("14: to Partial, from each layout; from one pending reduction to another") {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = sample({5, 6});
    const Placement product = Partial(ReduceOp::kProduct);
    struct Row {
      Placements from;
      Placements to;
    };
    for (const Row& row :
         std::vector<Row>{{{P, S0}, {P, S1}}, {{S0, P}, {R, P}}, {{S0, R}, {S0, P}}, {{product, R}, {P, R}}}) {
      CAPTURE(to_string(row.from));
      const at::Tensor moved = redistribute(spread(whole, mesh, row.from), row.to);
      CHECK(placements_of(moved) == row.to);
      CHECK(close(full_tensor(moved), whole));
    }
    // The reduction on the other mesh dimension stays pending.
    const at::Tensor pending = spread(whole, mesh, {P, S0});
    const CommCounter counter(mesh);
    redistribute(pending, {P, S1});
    CHECK(counts(counter) == "all_to_all 1");
  });
}

TEST_CASE("15: three mesh dimensions cut one tensor dimension in the order (1, 0, 2)") {
  on_mesh({2, 2, 2}, [](const DeviceMesh& mesh) {
    const Placements ordered = {S0.ordered(1), S0, S0.ordered(2)};
    for (const int64_t rows : {8, 11, 3}) {
      CAPTURE(rows);
      const at::Tensor whole = sample({rows, 2});
      const at::Tensor direct = distribute_tensor(whole, mesh, ordered, kNoSource);
      CHECK(same(to_local(direct), chunked(whole, mesh, {1, 0, 2})));
      CHECK(same(to_local(redistribute(spread(whole, mesh, {S0, S0, S0}), ordered)), to_local(direct)));
      const at::Tensor back = redistribute(direct, {R, S0, S0});
      CHECK(same(to_local(back), chunked(whole, mesh, {1, 2})));
      CHECK(same(to_local(redistribute(back, ordered)), to_local(direct)));
      CHECK(same(full_tensor(direct), whole));
    }
  });
}

TEST_CASE("16: (8, 4) on 4 x 2: a strided shard is Shard in another order") {
  on_mesh({4, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = sample({8, 4});
    // _StridedShard(-2, 2) gives each of four ranks its chunk of each of two chunks.
    const at::Tensor halves = whole.view({2, 4, 4}).select(1, mesh.local_rank(0));
    const at::Tensor mine = halves.narrow(0, mesh.local_rank(1), 1);
    for (const Placements& placements : {Placements{Shard(-2).ordered(1), Shard(-2)}, {S0.ordered(1), S0}}) {
      const at::Tensor t = distribute_tensor(whole, mesh, placements);
      CHECK(same(to_local(t), mine));
      CHECK(placements_of(t) == Placements{S0.ordered(1), S0});
    }
  });
}

TEST_CASE(
    "17: reductions over several mesh dimensions are one collective where they can be, nobody having flattened the "
    "mesh") {
  on_mesh({4, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = sample({16, 8});
    struct Row {
      Placements to;
      const char* collectives;
    };
    for (const Row& row :
         {Row{{R, R}, "all_reduce 1"}, Row{{S0, S0}, "reduce_scatter 1"}, Row{{S0, S1}, "reduce_scatter 1"}}) {
      CAPTURE(to_string(row.to));
      const at::Tensor pending = spread(whole, mesh, {P, P});
      const CommCounter counter(mesh);
      const at::Tensor moved = redistribute(pending, row.to);
      CHECK(counts(counter) == row.collectives);
      CHECK(close(full_tensor(moved), whole));
    }
  });
  on_mesh({2, 2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = sample({8, 3});
    const at::Tensor mixed = spread(whole, mesh, {P, S0, P});
    const CommCounter counter(mesh);
    CHECK(close(to_local(redistribute(mixed, {R, R, R})), whole));
    CHECK(counter.total() <= 2);
  });
}

TEST_CASE("18: sizes and places of uneven pieces that two mesh dimensions cut") {
  const auto rows = [](int64_t size, const Placements& placements, const std::vector<int64_t>& mesh, int64_t dp,
                       int64_t tp) {
    const std::vector<int64_t> coordinate = {dp, tp};
    return local_tile(std::vector<int64_t>{size, 2}, placements, mesh, coordinate)[0];
  };
  const Placements nested = {S0, S0};
  for (int64_t dp = 0; dp < 3; ++dp) {
    CHECK(rows(18, nested, {4, 2}, dp, 0) == Intervals{{5 * dp, 5 * dp + 3}});
    CHECK(rows(18, nested, {4, 2}, dp, 1) == Intervals{{5 * dp + 3, 5 * dp + 5}});
  }
  CHECK(rows(18, nested, {4, 2}, 3, 0) == Intervals{{15, 17}});
  CHECK(rows(18, nested, {4, 2}, 3, 1) == Intervals{{17, 18}});
  CHECK(rows(13, nested, {4, 2}, 3, 0) == Intervals{{12, 13}});
  CHECK(rows(13, nested, {4, 2}, 3, 1).empty());
  // Tensor parallelism over 8 ranks comes first, 512 rows each, then data parallelism over 30: 18 rows each, 8 on the
  // last but one, none on the last.
  const Placements outer = {S0.ordered(1), S0};
  for (const int64_t tp : {0, 3, 7}) {
    CHECK(rows(4096, outer, {30, 8}, 0, tp) == Intervals{{512 * tp, 512 * tp + 18}});
    CHECK(rows(4096, outer, {30, 8}, 27, tp) == Intervals{{512 * tp + 486, 512 * tp + 504}});
    CHECK(rows(4096, outer, {30, 8}, 28, tp) == Intervals{{512 * tp + 504, 512 * tp + 512}});
    CHECK(rows(4096, outer, {30, 8}, 29, tp).empty());
  }
}

TEST_CASE("19: pieces of 0 rows and 1, and pieces that differ where they are not cut") {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const int64_t me = mesh.local_rank(0);
    const at::Tensor whole = sample({1, 3});
    const at::Tensor mine = me == 1 ? whole : whole.narrow(0, 0, 0);
    const at::Tensor t =
        from_local(mine, mesh, {RaggedShard(0, {0, 1})}, {.shape = std::vector<int64_t>{1, 3}, .check = true});
    CHECK(same(full_tensor(t), whole));
    CHECK(close(full_tensor(t.sum(0)), whole.sum(0)));
    CHECK_THROWS_WITH(from_local(at::ones({2, 3 + me}), mesh, {S0}, {.check = true}), doctest::Contains("has a piece"));
  });
}

}  // namespace tessera::testing
