// Tests convolution and pooling of images that are sharded along spatial dimensions, against one process: results,
// gradients and collectives.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;
using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

namespace {

// Holds one operator on an image and replicated weights. The image is (1, 1, spatial...), so that only spatial
// dimensions can be sharded.
struct Case {
  std::string name;
  Sizes image;
  Tensors weights;
  std::function<Tensors(const at::Tensor& image, const Tensors& weights)> op;
};

template <class F>
Case conv(std::string name, Sizes image, const Sizes& weight, F f) {
  return {.name = std::move(name),
          .image = std::move(image),
          .weights = {sample(weight, 1), sample({1}, 2)},
          .op = [f](const at::Tensor& x, const Tensors& w) { return Tensors{f(x, w[0], w[1])}; }};
}

template <class F>
Case pool(std::string name, Sizes image, F f) {
  return {.name = std::move(name),
          .image = std::move(image),
          .weights = {},
          .op = [f](const at::Tensor& x, const Tensors&) {
            if constexpr (std::is_same_v<std::invoke_result_t<F, const at::Tensor&>, at::Tensor>) {
              return Tensors{f(x)};
            } else {
              const auto [values, indices] = f(x);
              return Tensors{values, indices};
            }
          }};
}

using T = const at::Tensor&;

std::vector<Case> convolutions() {
  return {
      conv("as it is", {1, 1, 13}, {1, 1, 3}, [](T x, T w, T b) { return at::conv1d(x, w, b, 1, 1); }),
      conv("without padding", {1, 1, 13}, {1, 1, 3}, [](T x, T w, T b) { return at::conv1d(x, w, b); }),
      conv("in steps", {1, 1, 17}, {1, 1, 5}, [](T x, T w, T b) { return at::conv1d(x, w, b, 2, 2); }),
      conv("steps larger than the kernel", {1, 1, 26}, {1, 1, 2},
           [](T x, T w, T b) { return at::conv1d(x, w, b, 5, 1); }),
      conv("dilated", {1, 1, 19}, {1, 1, 3}, [](T x, T w, T b) { return at::conv1d(x, w, b, 1, 3, 3); }),
      conv("a kernel of several pieces", {1, 1, 12}, {1, 1, 5},
           [](T x, T w, T b) { return at::conv1d(x, w, b, 1, 2); }),
      conv("fewer rows than ranks", {1, 1, 3, 5}, {1, 1, 2, 3},
           [](T x, T w, T b) { return at::conv2d(x, w, b, 1, 1); }),
      conv("two dimensions", {1, 1, 9, 8}, {1, 1, 3, 2},
           [](T x, T w, T b) {
             return at::conv2d(x, w, b, {2, 1}, {1, 0});
           }),
      conv("three dimensions", {1, 1, 8, 5, 4}, {1, 1, 3, 2, 3},
           [](T x, T w, T b) { return at::conv3d(x, w, b, 1, 1); }),
      conv("transposed", {1, 1, 11}, {1, 1, 3}, [](T x, T w, T b) { return at::conv_transpose1d(x, w, b); }),
      conv("transposed, in steps", {1, 1, 11, 4}, {1, 1, 3, 3},
           [](T x, T w, T b) { return at::conv_transpose2d(x, w, b, 2, 1, 1); }),
      conv("transposed, with gaps", {1, 1, 9}, {1, 1, 2},
           [](T x, T w, T b) { return at::conv_transpose1d(x, w, b, 4, 1, 2); }),
  };
}

std::vector<Case> poolings() {
  return {
      pool("maxima side by side", {1, 1, 12, 4}, [](T x) { return at::max_pool2d(x, 2); }),
      pool("maxima that overlap", {1, 1, 13, 9}, [](T x) { return at::max_pool2d_with_indices(x, 3, 2, 1); }),
      pool("dilated maxima", {1, 1, 13, 7},
           [](T x) {
             return at::max_pool2d_with_indices(x, {3, 2}, {1, 1}, {1, 1}, {2, 1});
           }),
      pool("maxima of windows that stick out", {1, 1, 11, 5},
           [](T x) { return at::max_pool2d_with_indices(x, 2, 2, 0, 1, true); }),
      pool("maxima of one dimension", {1, 1, 13}, [](T x) { return at::max_pool1d_with_indices(x, 3, 1, 1); }),
      pool("maxima of three dimensions", {1, 1, 9, 4, 5}, [](T x) { return at::max_pool3d_with_indices(x, 3, 2, 1); }),
      pool("means side by side", {1, 1, 12, 4}, [](T x) { return at::avg_pool2d(x, 2); }),
      pool("means that overlap", {1, 1, 13, 9}, [](T x) { return at::avg_pool2d(x, 3, 1, 1); }),
      pool("means without padding's places", {1, 1, 13, 9},
           [](T x) { return at::avg_pool2d(x, 3, 2, 1, true, false); }),
      pool("means of windows that stick out", {1, 1, 11, 5}, [](T x) { return at::avg_pool2d(x, 3, 2, 1, true); }),
      pool("sums over a number", {1, 1, 11, 5}, [](T x) { return at::avg_pool2d(x, 3, 1, 0, false, true, 4); }),
      pool("means of one dimension", {1, 1, 13}, [](T x) { return at::avg_pool1d(x, 3, 1, 1); }),
      pool("means of three dimensions", {1, 1, 9, 4, 5}, [](T x) { return at::avg_pool3d(x, 3, 2, 1); }),
  };
}

// Gives rank 1 most of the rows, and the last of several ranks none.
Placement ragged(int64_t dim, int64_t size, int64_t ranks) {
  Sizes sizes(static_cast<std::size_t>(ranks), 0);
  const int64_t owners = std::max<int64_t>(ranks - 1, 1);
  for (int64_t i = 0; i < size; ++i)
    ++sizes[static_cast<std::size_t>(i % 2 == 0 ? std::min<int64_t>(1, owners - 1) : i % owners)];
  return RaggedShard(dim, sizes);
}

std::vector<Placements> layouts(const DeviceMesh& mesh, const Sizes& image) {
  const bool flat = image.size() == 3;
  if (mesh.ndim() == 1) {
    std::vector<Placements> out = {{Shard(2)}, {ragged(2, image[2], mesh.size())}};
    if (!flat) out.push_back({Shard(3)});
    return out;
  }
  std::vector<Placements> out = {{Shard(2), Shard(2)}, {Replicate(), Shard(2)}, {Partial(), Shard(2)}};
  if (!flat) out.push_back({Shard(2), Shard(3)});
  if (!flat) out.push_back({Shard(3), Shard(2)});
  return out;
}

Tensors gradients(const Tensors& results, Tensors of) {
  at::Tensor loss = (results[0] * sample(results[0].sizes(), 7)).sum();
  loss.backward();
  for (at::Tensor& t : of) t = t.grad();
  return of;
}

struct Outcome {
  Tensors results;
  Tensors gradients;
};

Outcome run_plain(const Case& c) {
  Tensors weights;
  for (const at::Tensor& w : c.weights) weights.push_back(leaf(w));
  const at::Tensor image = leaf(sample(c.image));
  Tensors leaves = weights;
  leaves.insert(leaves.begin(), image);
  const Tensors results = c.op(image, weights);
  return {results, gradients(results, leaves)};
}

at::Tensor whole(const at::Tensor& t) { return full_tensor(t.detach()); }

void check_case(const Case& c, const DeviceMesh& mesh, const Placements& layout) {
  INFO(fmt::format("{} of [{}] as {}", c.name, fmt::join(c.image, ", "), to_string(layout)));
  const Outcome plain = run_plain(c);
  at::Tensor image = spread(sample(c.image), mesh, layout).requires_grad_(true);
  Tensors leaves = {image};
  Tensors weights;
  for (const at::Tensor& w : c.weights) {
    weights.push_back(spread(w, mesh, Placements(layout.size(), Replicate())).requires_grad_(true));
    leaves.push_back(weights.back());
  }
  const ImplicitReplication guard;
  const Tensors results = c.op(image, weights);
  for (std::size_t k = 0; k < results.size(); ++k) CHECK(close(whole(results[k]), plain.results[k].detach()));
  // The result is sharded along a spatial dimension too, so nothing was gathered.
  const Placement& last = placements_of(results[0]).back();
  CHECK((mesh.size() == 1 || (last.is_shard() && last.tensor_dim() >= 2)));
  const Tensors grads = gradients(results, leaves);
  for (std::size_t k = 0; k < grads.size(); ++k) CHECK(close(whole(grads[k]), plain.gradients[k], 1e-11));
}

void check_cases(const std::vector<Case>& cases) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const Case& c : cases) {
      for (const Placements& layout : layouts(mesh, c.image)) check_case(c, mesh, layout);
    }
  }
}

std::string kinds(const CommCounter& counter) {
  std::string out;
  for (const CollectiveRecord& record : counter.records()) out += (out.empty() ? "" : " ") + std::string(record.kind);
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("convolutions of an image sharded along spatial dimensions", {1, 2, 3, 4}) {
  check_cases(convolutions());
}
TESSERA_RANKS_TEST_CASE("poolings of an image sharded along spatial dimensions", {1, 2, 3, 4}) {
  check_cases(poolings());
}

TESSERA_RANKS_TEST_CASE("a cut image is convolved with one exchange of rows, and so is its gradient", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::NoGradGuard no_grad;
  const at::Tensor image = spread(sample({2, 4, 48, 6}), mesh, {Shard(2)});
  const at::Tensor weight = spread(sample({3, 4, 3, 3}, 1), mesh, {Replicate()});
  const at::Tensor bias = spread(sample({3}, 2), mesh, {Replicate()});
  CommCounter counter(mesh);
  const at::Tensor y = at::conv2d(image, weight, bias, 1, 1);
  CHECK(kinds(counter) == "all_to_all");
  // A rank sends at most one row to each neighbour: 2 images, 4 channels, 6 columns of 8 bytes.
  CHECK(counter.total_bytes() <= 2 * (2 * 4 * 6 * 8));
  CHECK(placements_of(y) == Placements{Shard(2)});
  counter.reset();
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      y, image, weight, at::IntArrayRef({3}), {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, 1, {true, true, true});
  CHECK(kinds(counter) == "all_to_all");
  CHECK(placements_of(of_input) == Placements{Shard(2)});
  CHECK(placements_of(of_weight) == Placements{Partial()});
  CHECK(placements_of(of_bias) == Placements{Partial()});
}

TESSERA_RANKS_TEST_CASE("windows that stay within pieces need no communication, under Strict too", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  const Strict strict;
  const at::Tensor image = spread(sample({2, 4, 24, 6}), mesh, {Shard(2)}).requires_grad_(true);
  const at::Tensor weight = spread(sample({4, 4, 1, 1}, 1), mesh, {Replicate()});
  CommCounter counter(mesh);
  const at::Tensor y = at::avg_pool2d(at::max_pool2d(at::conv2d(image, weight), 2), {1, 3}, {1, 3});
  y.sum().backward();
  CHECK(counter.total() == 0);
  CHECK(placements_of(y) == Placements{Shard(2)});
  CHECK(placements_of(image.grad()) == Placements{Shard(2)});
  const at::Tensor wide = spread(sample({4, 4, 3, 1}, 1), mesh, {Replicate()});
  CHECK_THROWS_WITH(at::conv2d(image, wide), doctest::Contains("a rank needs rows of other ranks (dimension 2: "));
}

TESSERA_RANKS_TEST_CASE("one exchange fetches corners, and rows of ranks that are not neighbours", {4}) {
  const at::NoGradGuard no_grad;
  const DeviceMesh square = mesh_over({2, 2});
  const at::Tensor whole_image = sample({1, 2, 16, 16});
  const at::Tensor filter = sample({2, 2, 3, 3}, 1);
  CommCounter counter(square);
  const at::Tensor image = spread(whole_image, square, {Shard(2), Shard(3)});
  const at::Tensor y = at::conv2d(image, spread(filter, square, {Replicate(), Replicate()}), {}, 1, 1);
  CHECK(kinds(counter) == "all_to_all");
  CHECK(placements_of(y) == Placements{Shard(2), Shard(3)});
  CHECK(close(full_tensor(y), at::conv2d(whole_image, filter, {}, 1, 1)));
  counter.reset();
  const at::Tensor rows = sample({1, 1, 40}, 3);
  const at::Tensor far = sample({1, 1, 2}, 4);
  const auto far_apart = [](T x, T w) { return at::conv1d(x, w, {}, Sizes{1}, Sizes{0}, Sizes{25}); };
  const at::Tensor z = far_apart(spread(rows, line(), {Shard(2)}), spread(far, line(), {Replicate()}));
  CHECK(kinds(counter) == "all_to_all");
  CHECK(close(full_tensor(z), far_apart(rows, far)));
}

TESSERA_RANKS_TEST_CASE("input channels, output channels and groups are sharded without communication", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  struct Row {
    std::string name;
    bool transposed;
    int64_t groups;
    Sizes weight;
    Placement of_image, of_weight, of_bias, of_result;
  };
  const std::vector<Row> rows = {
      {"out", false, 1, {5, 6, 3}, R, Shard(0), Shard(0), Shard(1)},
      {"in", false, 1, {5, 6, 3}, Shard(1), Shard(1), R, Partial()},
      {"groups", false, 6, {12, 1, 3}, Shard(1), Shard(0), Shard(0), Shard(1)},
      {"transposed, out", true, 1, {6, 5, 3}, R, Shard(1), Shard(0), Shard(1)},
      {"transposed, in", true, 1, {6, 5, 3}, Shard(1), Shard(0), R, Partial()},
      {"transposed, groups", true, 6, {6, 2, 3}, Shard(1), Shard(0), Shard(0), Shard(1)},
  };
  for (const Row& row : rows) {
    CAPTURE(row.name);
    const int64_t out = row.transposed ? row.weight[1] * row.groups : row.weight[0];
    const Tensors whole_inputs = {sample({2, 6, 7}), sample(row.weight, 1), sample({out}, 2)};
    const auto run = [&](const Tensors& t) {
      return at::convolution(t[0], t[1], t[2], {2}, {1}, {1}, row.transposed, {0}, row.groups);
    };
    Tensors plain;
    for (const at::Tensor& t : whole_inputs) plain.push_back(leaf(t));
    const at::Tensor wanted = run(plain);
    const Tensors wanted_grads = gradients({wanted}, plain);
    if (row.groups % mesh.size() != 0 && row.groups > 1) continue;
    Tensors cut;
    const Placements how = {row.of_image, row.of_weight, row.of_bias};
    for (std::size_t j = 0; j < 3; ++j) cut.push_back(spread(whole_inputs[j], mesh, {how[j]}).requires_grad_(true));
    const ImplicitReplication guard;
    CommCounter counter(mesh);
    const at::Tensor y = run(cut);
    CHECK(counter.total() == 0);
    CHECK(placements_of(y) ==
          Placements{mesh.size() == 1 && row.of_result.is_partial() ? placements_of(y)[0] : row.of_result});
    CHECK(close(full_tensor(y.detach()), wanted.detach()));
    const Tensors grads = gradients({y}, cut);
    for (std::size_t j = 0; j < 3; ++j) {
      CHECK(close(full_tensor(grads[j]), wanted_grads[j]));
      CHECK(placements_of(grads[j]) == Placements{how[j]});
    }
  }
}

TESSERA_RANKS_TEST_CASE("half precision, whole numbers and other memory formats of a cut image", {3}) {
  const DeviceMesh mesh = line();
  const at::NoGradGuard no_grad;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = sample({1, 1, 24, 6}, 0, type);
    const at::Tensor image = spread(x, mesh, {Shard(2)});
    CHECK(same(full_tensor(at::max_pool2d(image, 3, 1, 1)), at::max_pool2d(x, 3, 1, 1)));
    CHECK(close(full_tensor(at::avg_pool2d(image, 3, 1, 1)), at::avg_pool2d(x, 3, 1, 1),
                type == at::kFloat ? 1e-6 : 1e-2));
  }
  const at::Tensor counted = whole_numbers({1, 1, 24, 6}, at::kLong) - 2;
  CHECK(
      same(full_tensor(at::max_pool2d(spread(counted, mesh, {Shard(2)}), 3, 2, 1)), at::max_pool2d(counted, 3, 2, 1)));
  CHECK(
      same(full_tensor(at::avg_pool2d(spread(counted, mesh, {Shard(2)}), 3, 2, 1)), at::avg_pool2d(counted, 3, 2, 1)));
  const at::Tensor last = sample({2, 4, 24, 6}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor filter = sample({3, 4, 3, 3}, 1);
  const at::Tensor cut = distribute_tensor(last, mesh, {Shard(2)});
  const at::Tensor y = at::conv2d(cut, spread(filter, mesh, {Replicate()}), {}, 1, 1);
  CHECK(placements_of(y) == Placements{Shard(2)});
  CHECK(close(full_tensor(y), at::conv2d(last, filter, {}, 1, 1)));
}
