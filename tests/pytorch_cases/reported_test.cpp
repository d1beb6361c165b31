// Tests what users of PyTorch's DTensor reported as silently wrong, under the numbers of their issues
// (pytorch/pytorch).

#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/utils/clip_grad.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/placement/short_names.h"
#include "tessera/tests/pytorch_cases/beside_plain.h"

namespace tessera::testing {
namespace {

// Runs on 1-D meshes of 1 to 4 ranks with every placement, and on {2, 2} with all pairs of placements.
void on_layouts(const Placements& kinds, const std::function<void(const DeviceMesh&, const Placements&)>& body) {
  on_lines([&](const DeviceMesh& mesh) {
    for (const Placement& placement : kinds) body(mesh, {placement});
  });
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    for (const Placements& placements : all_layouts(2, kinds)) body(mesh, placements);
  });
}

// Returns this rank's part of `t` along dimension 0, split as torch.chunk does first by mesh dimension `first`, then by
// `second`.
at::Tensor cut_twice(const at::Tensor& t, const DeviceMesh& mesh, int64_t first, int64_t second) {
  const auto chunk = [&](const at::Tensor& x, int64_t mesh_dim) {
    const std::vector<at::Tensor> chunks = x.chunk(mesh.size(mesh_dim));
    const auto i = static_cast<std::size_t>(mesh.local_rank(mesh_dim));
    return i < chunks.size() ? chunks[i] : x.narrow(0, 0, 0);
  };
  return chunk(chunk(t, first), second);
}

}  // namespace

TEST_CASE("#147180 #163193 #145218 #153603: a number is added once to a pending value, and each number is its own") {
  on_layouts({P, S0, R, Partial(ReduceOp::kAvg), Partial(ReduceOp::kMax)},
             [](const DeviceMesh& mesh, const Placements& placements) {
               const std::vector<Operand> x = {{sample({5, 3}), placements}};
               for (const double number : {1.0, 2.0, -3.0, 0.0}) {
                 CAPTURE(number);
                 beside_plain(mesh, x, [&](const Tensors& t) { return t[0] + number; });
                 beside_plain(mesh, x, [&](const Tensors& t) { return t[0] * number; });
                 beside_plain(mesh, x, [&](const Tensors& t) { return number - t[0]; });
                 beside_plain(mesh, x, [&](const Tensors& t) { return t[0].sub(2, number); });
                 beside_plain(mesh, x, [&](const Tensors& t) { return t[0].clone().add_(number).mul_(number + 1); });
                 beside_plain(mesh, x, [&](const Tensors& t) { return t[0] + at::scalar_tensor(number, at::kDouble); });
                 beside_plain(mesh, x, [&](const Tensors& t) { return t[0].pow(2) / (number + 0.5); });
               }
             });
}

TEST_CASE("#147910 #159856: the norm of a pending value is the value's, not its terms'") {
  on_layouts({P, S0, S1, R}, [](const DeviceMesh& mesh, const Placements& placements) {
    const std::vector<Operand> x = {{sample({5, 3}), placements}};
    for (const double p : {2.0, 1.0, 3.0, 0.5, std::numeric_limits<double>::infinity(), 0.0}) {
      CAPTURE(p);
      beside_plain(mesh, x, [&](const Tensors& t) { return at::linalg_vector_norm(t[0], p); });
      beside_plain(mesh, x, [&](const Tensors& t) { return at::norm(t[0], p, at::IntArrayRef{1}); });
    }
    // This clips the gradients of all parameters together.
    const auto clipped = [](const at::Tensor& w) {
      (w * w).sum().backward();
      const double norm = torch::nn::utils::clip_grad_norm_({w}, 0.5);
      return at::scalar_tensor(norm, at::kDouble);
    };
    const at::Tensor want = leaf(x[0].whole), got = leaf(x[0].whole, mesh, placements);
    CHECK(close(clipped(got), clipped(want)));
    CHECK(close(full_tensor(got.grad()), want.grad()));
  });
}

TEST_CASE("#166598: a product of factors whose shared dimension is cut in different orders") {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const int64_t shared : {8, 5, 3}) {
      for (const Placements& left : {Placements{S1.ordered(1), S1}, {S1, S1}, {S1, S0}, {P, S1}}) {
        for (const Placements& right : {Placements{S0, S0}, {S0.ordered(1), S0}, {S0, S1}}) {
          CAPTURE(shared);
          beside_plain(mesh, {{sample({6, shared}), left}, {sample({shared, 7}, 1), right}},
                       [](const Tensors& x) { return at::matmul(x[0], x[1]); });
        }
      }
    }
  });
}

TEST_CASE("#172350: index_put of sharded values on indexed dimensions") {
  const at::Tensor rows = at::tensor({4, 0, 4, 1}, at::kLong), columns = at::tensor({2, 2, 0, 1}, at::kLong);
  const at::Tensor apart = at::tensor({4, 0, 2, 1}, at::kLong);  // no index occurs twice
  on_layouts({S0, S1, R}, [&](const DeviceMesh& mesh, const Placements& placements) {
    const Placements whole(placements.size(), R);
    for (const Placement& of_values : {S0, S1, R, P}) {
      const Placements values(placements.size(), of_values);
      const std::vector<Operand> by_rows = {{sample({5, 3}), placements}, {sample({4, 3}, 1), values}};
      CAPTURE(to_string(placements));
      for (const bool accumulate : {false, true}) {
        CAPTURE(accumulate);
        const at::Tensor& index = accumulate ? rows : apart;
        const auto put = [&](const at::Tensor& x, const at::Tensor& v, const Tensors& indices) {
          c10::List<std::optional<at::Tensor>> list;
          for (const at::Tensor& i : indices) {
            list.push_back(i.defined() && is_dtensor(x) ? spread(i, mesh, whole) : std::optional(i));
          }
          return at::index_put(x, list, v, accumulate);
        };
        beside_plain(mesh, by_rows, [&](const Tensors& x) { return put(x[0], x[1], {index}); });
        if (of_values == S1) continue;
        beside_plain(mesh, {{sample({5, 3}), placements}, {sample({4}, 1), values}}, [&](const Tensors& x) {
          return put(x[0], x[1], {index, columns});
        });
        beside_plain(mesh, {{sample({3, 5}), placements}, {sample({3, 4}, 1), values}}, [&](const Tensors& x) {
          return put(x[0], x[1], {at::Tensor(), index});
        });
      }
    }
  });
}

TEST_CASE("#179502: view of (12, 8) as (16, 6), and others whose pieces do not fit") {
  on_layouts({S0, S1, P}, [](const DeviceMesh& mesh, const Placements& placements) {
    for (const std::vector<int64_t>& to :
         {std::vector<int64_t>{16, 6}, {6, 16}, {96}, {4, 3, 8}, {2, 6, 4, 2}, {3, 32}}) {
      CAPTURE(to);
      beside_plain(mesh, {{sample({12, 8}), placements}}, [&](const Tensors& x) { return x[0].view(to) * 2; });
      beside_plain(mesh, {{sample({12, 8}), placements}},
                   [&](const Tensors& x) { return x[0].transpose(0, 1).reshape(to).sin(); });
    }
  });
}

TEST_CASE("#186282: unflatten of a dimension that two mesh dimensions cut, with its gradient") {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const Placements& placements : {Placements{S0, S0}, {S0.ordered(1), S0}, {S0, S1}, {S1, S1}, {S0, P}}) {
      for (const int64_t size : {8, 12, 6}) {
        for (const int64_t outer : {2, 3, 4}) {
          if (size % outer != 0) continue;
          CAPTURE(size);
          CAPTURE(outer);
          beside_plain(mesh, {{sample({size, 6}), placements}}, [&](const Tensors& x) {
            return x[0].unflatten(0, {outer, size / outer}).pow(2);
          });
          beside_plain(mesh, {{sample({size, 6}), placements}}, [&](const Tensors& x) {
            return x[0].unflatten(0, {outer, -1}).flatten(1).cos();
          });
        }
      }
    }
  });
}

TEST_CASE("#191926: the gradient of a convolution's input lies as the input does") {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    for (const Placement& placement : {S0, Shard(2), Shard(3), P}) {
      for (const int64_t stride : {1, 2}) {
        CAPTURE(stride);
        beside_plain(mesh,
                     {{sample({2, 3, 8, 16}), {placement}}, {sample({4, 3, 3, 3}, 1), {R}}, {sample({4}, 2), {R}}},
                     [&](const Tensors& x) { return at::conv2d(x[0], x[1], x[2], stride, 1); });
      }
    }
  });
}

TEST_CASE("#172812: a function of uneven pieces, put together again by the global shape") {
  on_lines([](const DeviceMesh& mesh) {
    for (const int64_t rows : {5, 3, 2}) {
      beside_plain(mesh, {{sample({rows, 4}), {S0}}}, [&](const Tensors& x) {
        const auto local_function = [](const at::Tensor& t) { return at::softmax(t * 2, 1); };
        if (!is_dtensor(x[0])) return local_function(x[0]);
        return from_local(local_function(to_local(x[0])), mesh, {S0}, {.shape = std::vector<int64_t>{rows, 4}});
      });
    }
  });
}

TEST_CASE("#172932 #173454 #173153: to_local and from_local of a pending value give its gradients") {
  on_lines([](const DeviceMesh& mesh) {
    const auto crossed = [&](const at::Tensor& t) {
      return is_dtensor(t) ? from_local(to_local(t), mesh, placements_of(t)) : t;
    };
    const Ran ran = beside_plain(mesh, {{sample({5, 6}), {S1}}, {sample({6, 3}, 1), {S0}}}, [&](const Tensors& x) {
      const at::Tensor product = at::matmul(x[0], x[1]);
      if (is_dtensor(product))
        CHECK(placements_of(product) == Placements{mesh.size() == 1 ? placements_of(product)[0] : P});
      return crossed(product).pow(2);
    });
    beside_plain(mesh, {{sample({5, 6}), {P}}}, [&](const Tensors& x) { return crossed(x[0] * 3) + crossed(x[0]); });
  });
}

TEST_CASE("#175867: who uses a whole weight on its own tokens says so, and its gradient is reduced once") {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor tokens = sample({8, 3}), scale = sample({3}, 1);
    const at::Tensor want = leaf(scale);
    (tokens * want).pow(2).sum().backward();
    const at::Tensor mine = piece_of(tokens, mesh, {S0});
    // The gradient's placement is stated at to_local: one all_reduce.
    const at::Tensor weight = leaf(scale, mesh, {R});
    CommCounter counter(mesh);
    (mine * to_local(weight, Placements{P})).pow(2).sum().backward();
    CHECK(counts(counter) == "all_reduce 1");
    CHECK(close(full_tensor(weight.grad()), want.grad()));
    // It is stated at from_local: the caller's own gradient stays this rank's term, without communication.
    const at::Tensor local = leaf(scale);
    counter.reset();
    const at::Tensor entered = from_local(local, mesh, {R}, {.grad_placements = Placements{P}});
    (spread(tokens, mesh, {S0}) * entered).pow(2).sum().backward();
    CHECK(counts(counter) == "-");
    CHECK(close(full_tensor(from_local(local.grad(), mesh, {P})), want.grad()));
    // A DTensor's operators need no such statement.
    const at::Tensor norm_weight = leaf(scale, mesh, {R}), want_norm = leaf(scale);
    at::rms_norm(tokens, {3}, want_norm).pow(2).sum().backward();
    counter.reset();
    at::rms_norm(spread(tokens, mesh, {S0}), {3}, norm_weight).pow(2).sum().backward();
    CHECK(counts(counter) == "all_reduce 1");
    CHECK(close(full_tensor(norm_weight.grad()), want_norm.grad()));
  });
}

TEST_CASE("#103306 #110762 #144109: uneven pieces make the tensor that the shape says, or are refused") {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = sample({7, 2});
    const std::vector<int64_t> sizes = {1, 4, 2};
    const Placement ragged = RaggedShard(0, sizes);
    const at::Tensor mine = piece_of(whole, mesh, {ragged}).clone();
    const at::Tensor t = from_local(mine, mesh, {ragged}, {.shape = whole.sizes().vec(), .check = true});
    CHECK(same(full_tensor(t), whole));
    CHECK(close(full_tensor(t.sum(0)), whole.sum(0)));
    CHECK(same(full_tensor(redistribute(t, {S0})), whole));
    CHECK_THROWS_WITH(from_local(mine, mesh, {S0}, {.check = true}), doctest::Contains("has a piece"));
    CHECK_THROWS_WITH(from_local(mine, mesh, {S0}, {.shape = whole.sizes().vec(), .check = true}),
                      doctest::Contains("do not make one tensor [7, 2] as [S(0)]"));
  });
}

TEST_CASE("#161368 #168134 #150490: pieces of uneven rows that two mesh dimensions cut, in either order") {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 2}, {4, 2}, {2, 3}, {3, 1}}) {
    on_mesh(shape, [](const DeviceMesh& mesh) {
      for (const int64_t rows : {18, 13, 9, 5, 3, 1, 0}) {
        CAPTURE(rows);
        const at::Tensor whole = sample({rows, 2});
        const at::Tensor inner = distribute_tensor(whole, mesh, {S0, S0}),
                         outer = distribute_tensor(whole, mesh, {S0.ordered(1), S0});
        CHECK(same(to_local(inner), cut_twice(whole, mesh, 0, 1)));
        CHECK(same(to_local(outer), cut_twice(whole, mesh, 1, 0)));
        CHECK(same(full_tensor(inner), whole));
        CHECK(same(full_tensor(outer), whole));
        CHECK(same(to_local(redistribute(inner, {S0.ordered(1), S0})), to_local(outer)));
        CHECK(same(to_local(redistribute(outer, {S1, S0})), piece_of(whole, mesh, {S1, S0})));
      }
    });
  }
}

TEST_CASE(
    "#129206 #129229 #130760: rows cut by tensor parallel first and by data parallel then come back in their order") {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const int64_t rows : {8, 7, 2}) {
      const at::Tensor whole = sample({rows, 3});
      const at::Tensor mine = cut_twice(whole, mesh, /*first=*/1, /*second=*/0).clone();
      const at::Tensor weight =
          from_local(mine, mesh, {S0.ordered(1), S0}, {.shape = whole.sizes().vec(), .check = true});
      CHECK(same(full_tensor(weight), whole));
      beside_plain(mesh, {{sample({4, 3}), {S0, R}}, {whole, {S0.ordered(1), S0}}},
                   [](const Tensors& x) { return at::linear(x[0], x[1]); });
    }
  });
}

TEST_CASE("#174301: the dtype that a call asks for is its own, whatever the last call asked for") {
  on_layouts({S0, P, R}, [](const DeviceMesh& mesh, const Placements& placements) {
    const at::Tensor whole = whole_numbers({5, 3}, at::kFloat), x = spread(whole, mesh, placements);
    for (const auto& dtype :
         std::vector<std::optional<at::ScalarType>>{std::nullopt, at::kDouble, at::kLong, at::kDouble}) {
      const auto same_as_plain = [&](const std::function<at::Tensor(const at::Tensor&)>& f) {
        CHECK(close(full_tensor(f(x)), f(whole), 1e-6));
      };
      same_as_plain([&](const at::Tensor& t) { return at::sum(t, dtype); });
      same_as_plain([&](const at::Tensor& t) { return at::prod(t, 1, false, dtype); });
      same_as_plain([&](const at::Tensor& t) { return at::cumsum(t, 1, dtype); });
      same_as_plain([&](const at::Tensor& t) { return at::zeros_like(t, at::TensorOptions().dtype(dtype)); });
      if (dtype == at::kLong) continue;
      same_as_plain([&](const at::Tensor& t) { return at::mean(t, dtype); });
      same_as_plain([&](const at::Tensor& t) { return at::softmax(t, 1, dtype); });
      same_as_plain([&](const at::Tensor& t) { return at::linalg_vector_norm(t, 2, {}, false, dtype); });
    }
  });
}

TEST_CASE("#134050: attention without gradients, then with: each has what it needs") {
  on_layouts({S0, S1, R}, [](const DeviceMesh& mesh, const Placements& placements) {
    const std::vector<Operand> qkv = {{sample({2, 4, 5, 3}), placements}, {sample({2, 4, 5, 3}, 1), placements}};
    const Operator attend = [](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[1]); };
    for (const bool grad : {false, true, false, true}) {
      const at::AutoGradMode mode(grad);
      beside_plain(mesh, qkv, attend);
    }
  });
}

TEST_CASE("#196562 #168058: tensors filled one after the other differ, and are the same on any number of ranks") {
  std::vector<at::Tensor> first;
  std::mutex mutex;
  on_layouts({S0, R}, [&](const DeviceMesh& mesh, const Placements& placements) {
    manual_seed(5, mesh.world());
    const auto fill = [&] {
      return full_tensor(spread(at::zeros({6, 3}, at::kDouble), mesh, placements).uniform_(-1, 1));
    };
    const std::vector<at::Tensor> filled = {fill(), fill(),
                                            full_tensor(tessera::randn({6, 3}, mesh, placements, at::kDouble))};
    CHECK_FALSE(same(filled[0], filled[1]));
    const std::lock_guard lock(mutex);
    if (first.empty()) first = filled;
    for (std::size_t i = 0; i < filled.size(); ++i) CHECK(same(filled[i], first[i]));
  });
}

}  // namespace tessera::testing
