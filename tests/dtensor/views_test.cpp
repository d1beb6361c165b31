// Tests views of sharded dimensions: each rank views its own piece, nothing is communicated, and a write through the
// view reaches the tensor.

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct ReadView {
  const char* name;
  at::Tensor (*of)(const at::Tensor& x);  // x is 12 x 10
  bool one_of_many = false;               // LibTorch does not allow writing it under autograd
};

// Lists the views that are views of pieces however the first two dimensions are sharded.
const std::vector<ReadView>& read_views() {
  static const std::vector<ReadView> all = {
      {"the first rows", [](const at::Tensor& x) { return x.slice(0, 0, 2); }},
      {"rows in the middle", [](const at::Tensor& x) { return x.slice(0, 3, 10); }},
      {"the last row", [](const at::Tensor& x) { return x.slice(0, -1); }},
      {"no rows", [](const at::Tensor& x) { return x.slice(0, 4, 4); }},
      {"columns", [](const at::Tensor& x) { return x.narrow(1, 1, 7); }},
      {"a row", [](const at::Tensor& x) { return x.select(0, 7); }},
      {"the last column", [](const at::Tensor& x) { return x.select(1, -1); }},
      {"a part of a split", [](const at::Tensor& x) { return x.split(5, 0)[1]; }, /*one_of_many=*/true},
      {"the rest of a split",
       [](const at::Tensor& x) {
         return x.split_with_sizes({2, 10}, 0)[1];
       },
       /*one_of_many=*/true},
      {"a chunk", [](const at::Tensor& x) { return x.chunk(3, 1)[2]; }, /*one_of_many=*/true},
      {"one of an unbind", [](const at::Tensor& x) { return x.unbind(1)[4]; }, /*one_of_many=*/true},
      {"a view of a view", [](const at::Tensor& x) { return x.slice(0, 1, 11).slice(0, 2, 8).select(1, 3); }},
      {"a transposed part", [](const at::Tensor& x) { return x.slice(1, 2, 9).t().slice(1, 5); }},
      {"flattened", [](const at::Tensor& x) { return x.view({120}); }},
      {"rows and a part",
       [](const at::Tensor& x) {
         return x.view({1, 12, 1, 10}).slice(1, 3, 9);
       }},
  };
  return all;
}

// Layouts of a tensor of 12 x 10.
std::vector<Placements> cuts(const DeviceMesh& mesh) {
  const int64_t n = mesh.mesh().shape()[0];
  std::vector<int64_t> sizes(static_cast<std::size_t>(n), 0);
  sizes.front() = 5;
  sizes.back() += 7;
  Placements kinds = {R, S0, S1, BlockCyclic(0, 2), BlockCyclic(1, 1)};
  if (mesh.ndim() == 1) kinds.push_back(RaggedShard(0, sizes));
  return all_layouts(mesh.ndim(), kinds);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("views of sharded dimensions communicate nothing, and alias", {1, 2, 3, 4}) {
  const at::Tensor whole = sample({12, 10});
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& placements : cuts(mesh)) {
      for (const ReadView& view : read_views()) {
        CAPTURE(to_string(placements));
        CAPTURE(view.name);
        const at::Tensor d = spread(whole.clone(), mesh, placements);
        at::Tensor part;
        {
          const Strict strict;
          part = view.of(d);
        }
        const at::Tensor expected = view.of(whole);
        CHECK(part.sizes() == expected.sizes());
        CHECK(part.strides() == expected.strides());
        CHECK(same(full_tensor(part), expected));
        {
          const Strict strict;
          part.mul_(-2).add_(1);
        }
        const at::Tensor changed = whole.clone();
        view.of(changed).mul_(-2).add_(1);
        CHECK(close(full_tensor(d), changed));
        CHECK(placements_of(d) == placements);
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("gradients through views of sharded dimensions have the viewed tensor's layout", {1, 2, 3, 4}) {
  const at::Tensor whole = sample({12, 10});
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& placements : cuts(mesh)) {
      for (const ReadView& view : read_views()) {
        CAPTURE(to_string(placements));
        CAPTURE(view.name);
        const auto loss = [&](const at::Tensor& leaf) {
          const at::Tensor x = leaf * 1.5;
          at::Tensor part = view.of(x);
          if (!view.one_of_many) part.mul_(-2).add_(1);
          return (x * x).sum() + part.exp().sum();
        };
        at::Tensor plain = whole.clone().requires_grad_(true);
        loss(plain).backward();
        at::Tensor d = spread(whole.clone(), mesh, placements).requires_grad_(true);
        loss(d).backward();
        CHECK(close(full_tensor(d.grad()), plain.grad()));
        CHECK(placements_of(d.grad()) == placements);
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("V4: what is assigned to a part of a cut dimension is kept", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor d = spread(sample({6, 4}), mesh, {S0});
  const CommCounter counter(mesh.world());
  d.slice(0, 0, 2).zero_();
  d.select(0, 4).fill_(7);
  CHECK(counter.total() == 0);
  at::Tensor expected = sample({6, 4});
  expected.slice(0, 0, 2).zero_();
  expected.select(0, 4).fill_(7);
  CHECK(same(full_tensor(d), expected));
}

TESSERA_RANKS_TEST_CASE("the layouts of parts are the plainest there are", {2}) {
  const DeviceMesh mesh = line();
  const auto layout = [](const at::Tensor& t) { return to_string(placements_of(t)); };
  const at::Tensor d = spread(sample({8, 6}), mesh, {S0});
  CHECK(layout(d.slice(0, 2, 6)) == "[S(0)]");
  CHECK(layout(d.slice(0, 0, 2)) == "[RS(0,2,0)]");
  CHECK(layout(d.slice(0, 3)) == "[RS(0,1,4)]");
  CHECK(layout(d.slice(0, 0, 8, 2)) == "[S(0)]");
  CHECK(layout(d.select(0, 5)) == "[RS(0,0,6)]");
  CHECK(layout(d.view({2, 4, 6})) == "[S(0)]");
  CHECK(layout(d.view({48})) == "[S(0)]");
  const at::Tensor columns = spread(sample({8, 6}), mesh, {S1});
  CHECK(layout(columns.view({48})) == "[BC(0,3)]");
  CHECK(layout(columns.view({48}).view({8, 6})) == "[S(1)]");
  CHECK(layout(columns.view({2, 4, 6}).view({2, 24})) == "[BC(1,3)]");
  CHECK(layout(columns.view({8, 2, 3})) == "[S(1)]");
  CHECK(layout(spread(sample({8, 6}), mesh, {BlockCyclic(0, 2)}).slice(0, 1, 7)) == "[IS(0,0-1+3-5,1-3+5-6)]");
}

TESSERA_RANKS_TEST_CASE("a view that is no view of the pieces is a copy, of which what is written is brought back",
                        {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor d = spread(sample({6, 4}), mesh, {S0});
  const CommCounter counter(mesh.world());
  const at::Tensor rows = d.view({2, 2, 6});  // 12 elements per rank: one row each
  CHECK(counter.total() == 0);
  const at::Tensor uneven = d.view({8, 3});
  CHECK(counter.total() == 0);
  const at::Tensor apart = spread(sample({3, 4}), mesh, {S0}).view({4, 3});  // pieces of 8 and 4 elements
  CHECK(counter.total() == 1);
  CHECK(same(full_tensor(apart), sample({3, 4}).view({4, 3})));
  apart.zero_();
  CHECK(counter.total() == 1);  // each rank has all of it
  const at::Tensor vector = spread(sample({3}), mesh, {S0}), number = vector.select(0, 1);
  CHECK(same(full_tensor(number), sample({3})[1]));
  number.zero_();
  CHECK(full_tensor(vector)[1].item<double>() == 0);
}
