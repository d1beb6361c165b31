// Tests scaled_dot_product_attention against one process: results, gradients (the mask's too), and that nothing is
// communicated where every rank has whole items and heads.

#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;
using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

namespace {

// There are two items, three heads, five queries and four keys: fewer items than ranks, and uneven heads.
const Sizes kQuery = {2, 3, 5, 4}, kKey = {2, 3, 4, 4}, kValue = {2, 3, 4, 6};

struct Mask {
  std::string name;
  std::optional<Sizes> sizes;
  bool of_truth = false;
  bool causal = false;
};

const std::vector<Mask> kMasks = {
    {.name = "none", .sizes = std::nullopt},
    {.name = "causal", .sizes = std::nullopt, .causal = true},
    {.name = "of truth values, the same for all", .sizes = Sizes{5, 4}, .of_truth = true},
    {.name = "terms of the scores, the same for all", .sizes = Sizes{1, 1, 5, 4}},
    {.name = "terms of each head", .sizes = Sizes{3, 5, 4}},
    {.name = "terms of each item and head", .sizes = Sizes{2, 3, 5, 4}},
};

at::Tensor values_of(const Mask& mask) {
  if (!mask.sizes) return {};
  return mask.of_truth ? sample(*mask.sizes, 4) > -0.8 : sample(*mask.sizes, 4);
}

// Returns a mask's layout for query, key and value laid out as `layout`: sharded where the mask has that dimension and
// its size is above 1.
Placements mask_layout(const Mask& mask, const Placements& layout) {
  Placements out;
  for (const Placement& p : layout) {
    const int64_t own = p.is_shard() ? p.tensor_dim() - (4 - std::ssize(*mask.sizes)) : -1;
    const bool cut = own >= 0 && mask.sizes->at(static_cast<std::size_t>(own)) > 1;
    out.push_back(cut ? Shard(own) : Replicate());
  }
  return out;
}

at::Tensor attend(const Tensors& in, const Mask& mask, double dropout = 0) {
  const std::optional<at::Tensor> given = mask.sizes ? std::optional(in[3]) : std::nullopt;
  return at::scaled_dot_product_attention(in[0], in[1], in[2], given, dropout, mask.causal);
}

Tensors leaves(Tensors in) {
  for (at::Tensor& t : in) {
    t = t.detach();
    if (t.is_floating_point()) t.requires_grad_(true);
  }
  return in;
}

Tensors plain_inputs(const Mask& mask) {
  Tensors out = {sample(kQuery, 1), sample(kKey, 2), sample(kValue, 3)};
  if (mask.sizes) out.push_back(values_of(mask));
  return leaves(out);
}

Tensors spread_inputs(const Mask& mask, const DeviceMesh& mesh, const Placements& layout) {
  Tensors out;
  for (const at::Tensor& t : plain_inputs(mask)) {
    out.push_back(spread(t.detach(), mesh, out.size() == 3 ? mask_layout(mask, layout) : layout));
  }
  return leaves(out);
}

void check(const Mask& mask, const DeviceMesh& mesh, const Placements& layout) {
  INFO(fmt::format("mask: {}; {}", mask.name, to_string(layout)));
  const Tensors plain = plain_inputs(mask);
  const at::Tensor expected = attend(plain, mask);
  expected.backward(sample(expected.sizes(), 7));
  const Tensors inputs = spread_inputs(mask, mesh, layout);
  const Strict strict;
  CommCounter counter(mesh);
  const at::Tensor result = attend(inputs, mask);
  CHECK(placements_of(result) == layout);
  CHECK(counter.total() == 0);
  {
    const at::NoGradGuard no_grad;
    CHECK(close(full_tensor(attend(inputs, mask)), expected.detach()));
  }
  CHECK(close(full_tensor(result.detach()), expected.detach()));
  result.backward(spread(sample(expected.sizes(), 7), mesh, layout));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) continue;
    CAPTURE(i);
    CHECK(close(full_tensor(inputs[i].grad()), plain[i].grad(), 1e-11));
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("attention on whole items and heads needs no communication", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& layout : all_layouts(mesh.ndim(), {Replicate(), Shard(0), Shard(1)})) {
      for (const Mask& mask : kMasks) check(mask, mesh, layout);
    }
  }
}

TESSERA_RANKS_TEST_CASE("whole keys, values and masks are cut as the queries are, and nothing is sent", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& layout : all_layouts(mesh.ndim(), {Replicate(), Shard(0), Shard(1)})) {
      for (const Mask& mask : kMasks) {
        for (const bool plain_mask : {false, true}) {
          INFO(fmt::format("mask: {}, plain: {}; {}", mask.name, plain_mask, to_string(layout)));
          const Tensors plain = plain_inputs(mask);
          const at::Tensor expected = attend(plain, mask);
          expected.backward(sample(expected.sizes(), 7));
          const Placements whole(layout.size(), Replicate());
          Tensors inputs = leaves(spread_inputs(mask, mesh, whole));
          inputs[0] = leaves({spread(plain[0].detach(), mesh, layout)})[0];
          if (mask.sizes) inputs[3] = plain_mask ? plain[3].detach() : inputs[3].detach();
          CommCounter counter(mesh);
          const ImplicitReplication guard(plain_mask);
          const at::Tensor result = attend(inputs, mask);
          CHECK(counter.total() == 0);
          CHECK(placements_of(result) == layout);
          CHECK(close(full_tensor(result.detach()), expected.detach()));
          result.backward(spread(sample(expected.sizes(), 7), mesh, layout));
          for (std::size_t i = 0; i < inputs.size(); ++i) {
            if (!inputs[i].requires_grad()) continue;
            CAPTURE(i);
            CHECK(close(full_tensor(inputs[i].grad()), plain[i].grad(), 1e-11));
          }
        }
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("heads that serve groups of the queries' are cut as they are, where the ranks divide them",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor q = sample({2, 12, 5, 4}, 1), k = sample({2, 6, 4, 4}, 2), v = sample({2, 6, 4, 4}, 3);
  const auto grouped = [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
    return at::scaled_dot_product_attention(query, key, value, {}, 0, false, std::nullopt, /*enable_gqa=*/true);
  };
  CommCounter counter(mesh);
  const at::Tensor result =
      grouped(spread(q, mesh, {Shard(1)}), spread(k, mesh, {Replicate()}), spread(v, mesh, {Replicate()}));
  if (6 % mesh.size() == 0) CHECK(counter.total() == 0);
  CHECK(close(full_tensor(result), grouped(q, k, v)));
  const std::vector<int64_t> none(static_cast<std::size_t>(mesh.size()) - 1, 0);
  std::vector<int64_t> ragged = {12};
  ragged.insert(ragged.end(), none.begin(), none.end());
  const Placement uneven = RaggedShard(1, ragged);
  CHECK(close(full_tensor(grouped(spread(q, mesh, {uneven}), spread(k, mesh, {R}), spread(v, mesh, {R}))),
              grouped(q, k, v)));
}

TESSERA_RANKS_TEST_CASE("keys and masks that no slice fits to the queries are left to the rules", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const at::Tensor q = sample({1, 8, 5, 4}, 1), k = sample({1, 2, 4, 4}, 2), v = sample({1, 2, 4, 4}, 3);
  const auto attended = [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& mask) {
    return at::scaled_dot_product_attention(query, key, value, mask, 0, false, std::nullopt, /*enable_gqa=*/true);
  };
  const at::Tensor mask = sample({1, 1, 5, 4}, 4), want = attended(q, k, v, mask);
  const Placements heads = {Shard(1), Shard(1)};
  for (const Placements& lies : {Placements{Shard(1), R}, Placements{R, R}, Placements{R, Shard(1)}}) {
    for (const Placements& cut : {heads, Placements{Shard(0), Shard(1)}, Placements{Shard(1), R}}) {
      CAPTURE(to_string(lies));
      CAPTURE(to_string(cut));
      CHECK(close(full_tensor(attended(spread(q, mesh, cut), spread(k, mesh, lies), spread(v, mesh, lies),
                                       spread(mask, mesh, {R, R}))),
                  want));
    }
  }
}

TESSERA_RANKS_TEST_CASE("attention with dropout draws the same numbers on any mesh", {1, 2, 3, 4}) {
  const std::vector<Mask> masks = {kMasks[0], kMasks[2]};
  Tensors first(masks.size());  // the results on the first mesh and in the first layout, by mask
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& layout : all_layouts(mesh.ndim(), {Replicate(), Shard(0), Shard(1)})) {
      for (std::size_t m = 0; m < masks.size(); ++m) {
        const Mask& mask = masks[m];
        CAPTURE(mask.name);
        CAPTURE(to_string(layout));
        manual_seed(5, mesh.world());
        const at::Tensor whole = full_tensor(attend(spread_inputs(mask, mesh, layout), mask, 0.4).detach());
        manual_seed(5, mesh.world());
        const at::Tensor one =
            full_tensor(attend(spread_inputs(mask, mesh, Placements(layout.size(), Replicate())), mask, 0.4).detach());
        CHECK(close(whole, one));
        if (!first[m].defined()) first[m] = whole;
        CHECK(close(whole, first[m]));
        CHECK(!close(whole, attend(plain_inputs(mask), mask).detach()));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("attention in other layouts is redistributed to one in which it can be computed", {2, 4}) {
  const DeviceMesh mesh = line();
  const Mask none = kMasks[0];
  const Tensors plain = plain_inputs(none);
  const at::Tensor expected = attend(plain, none).detach();
  for (const Placement& p : {Shard(2), Shard(3), Partial()}) {
    const Tensors inputs = spread_inputs(none, mesh, {p});
    CHECK(close(full_tensor(attend(inputs, none).detach()), expected));
  }
  const Tensors heads = spread_inputs(none, mesh, {Shard(1)}), items = spread_inputs(none, mesh, {Shard(0)});
  CHECK(close(full_tensor(attend({heads[0], items[1], heads[2]}, none).detach()), expected));
  CHECK_THROWS_WITH_AS(attend({heads[0], plain[1], heads[2]}, none), doctest::Contains("plain"), std::invalid_argument);
}
