// Tests operators on DTensors of many layouts against plain tensors: values, dtypes, gradients and their layouts.

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("the matmul family", {1, 2, 3, 4}) {
  check_ops({
      op_case("mm", {sample({5, 3}), sample({3, 7}, 1)}, [](const Tensors& x) { return at::mm(x[0], x[1]); }),
      op_case("mm of an empty sum", {sample({5, 0}), sample({0, 4}, 1)},
              [](const Tensors& x) { return at::mm(x[0], x[1]); }),
      op_case("mm of one row", {sample({1, 6}), sample({6, 2}, 1)},
              [](const Tensors& x) { return at::mm(x[0], x[1]); }),
      op_case("mm of no rows", {sample({0, 4}), sample({4, 2}, 1)},
              [](const Tensors& x) { return at::mm(x[0], x[1]); }),
      op_case("mm with t", {sample({5, 3}), sample({7, 3}, 1)},
              [](const Tensors& x) { return at::mm(x[0], x[1].t()); }),
      op_case("addmm", {sample({7}), sample({5, 3}, 1), sample({3, 7}, 2)},
              [](const Tensors& x) { return at::addmm(x[0], x[1], x[2]); }),
      op_case("addmm of a matrix, scaled", {sample({5, 7}), sample({5, 3}, 1), sample({3, 7}, 2)},
              [](const Tensors& x) { return at::addmm(x[0], x[1], x[2], 0.5, 2); }),
      op_case("addmm of a column", {sample({5, 1}), sample({5, 3}, 1), sample({3, 7}, 2)},
              [](const Tensors& x) { return at::addmm(x[0], x[1], x[2]); }),
      op_case("linear, 2-D", {sample({5, 3}), sample({7, 3}, 1), sample({7}, 2)},
              [](const Tensors& x) { return at::linear(x[0], x[1], x[2]); }),
      op_case("linear, 3-D", {sample({3, 5, 3}), sample({7, 3}, 1), sample({7}, 2)},
              [](const Tensors& x) { return at::linear(x[0], x[1], x[2]); }),
      op_case("linear, 3-D, no bias", {sample({2, 5, 4}), sample({6, 4}, 1)},
              [](const Tensors& x) { return at::linear(x[0], x[1]); }),
      op_case("matmul, 4-D by 2-D", {sample({2, 3, 5, 4}), sample({4, 6}, 1)},
              [](const Tensors& x) { return at::matmul(x[0], x[1]); }),
      op_case("matmul of vectors", {sample({5}), sample({5}, 1)},
              [](const Tensors& x) { return at::matmul(x[0], x[1]); }),
      op_case("matmul, matrix by vector", {sample({5, 3}), sample({3}, 1)},
              [](const Tensors& x) { return at::matmul(x[0], x[1]); }),
      op_case("matmul, vector by matrix", {sample({3}), sample({3, 5}, 1)},
              [](const Tensors& x) { return at::matmul(x[0], x[1]); }),
      op_case("matmul, batched", {sample({2, 3, 5, 4}), sample({2, 3, 4, 6}, 1)},
              [](const Tensors& x) { return at::matmul(x[0], x[1]); }),
      op_case("matmul, batches broadcast", {sample({3, 1, 5, 4}), sample({2, 4, 6}, 1)},
              [](const Tensors& x) { return at::matmul(x[0], x[1]); }),
      op_case("matmul, 2-D by 3-D", {sample({5, 4}), sample({3, 4, 2}, 1)},
              [](const Tensors& x) { return at::matmul(x[0], x[1]); }),
      op_case("bmm", {sample({3, 5, 4}), sample({3, 4, 2}, 1)}, [](const Tensors& x) { return at::bmm(x[0], x[1]); }),
      op_case("baddbmm", {sample({3, 5, 2}), sample({3, 5, 4}, 1), sample({3, 4, 2}, 2)},
              [](const Tensors& x) { return at::baddbmm(x[0], x[1], x[2], 2, 0.5); }),
      op_case("einsum", {sample({3, 5, 4}), sample({3, 4, 2}, 1)},
              [](const Tensors& x) {
                return at::einsum("bik,bkj->bij", {x[0], x[1]});
              }),
      op_case("dot and mv", {sample({5}), sample({5, 3}, 1)},
              [](const Tensors& x) { return at::mv(x[1].t(), x[0]) + at::dot(x[0], x[0]); }),
      op_case("outer", {sample({5}), sample({3}, 1)}, [](const Tensors& x) { return at::outer(x[0], x[1]); }),
  });
}

TESSERA_RANKS_TEST_CASE("views", {1, 2, 3, 4}) {
  const at::Tensor cube = sample({4, 6, 5});
  check_ops({
      op_case("heads", {sample({3, 5, 12})},
              [](const Tensors& x) {
                return x[0].view({3, 5, 4, 3}).transpose(1, 2).contiguous();
              }),
      op_case("heads and back", {sample({3, 5, 12})},
              [](const Tensors& x) {
                return x[0].view({3, 5, 4, 3}).transpose(1, 2).transpose(1, 2).reshape({3, 5, 12});
              }),
      op_case("flatten", {cube}, [](const Tensors& x) { return x[0].flatten(0, 1); }),
      op_case("flatten all", {cube}, [](const Tensors& x) { return x[0].reshape({-1}); }),
      op_case("flatten the last two", {cube}, [](const Tensors& x) { return x[0].flatten(1); }),
      op_case("unflatten", {sample({12, 5})},
              [](const Tensors& x) {
                return x[0].view({2, 6, 5});
              }),
      op_case("view of singletons", {sample({3, 8})},
              [](const Tensors& x) {
                return x[0].view({1, 3, 2, 4, 1});
              }),
      op_case("another view", {sample({2, 3, 4})},
              [](const Tensors& x) {
                return x[0].view({3, 2, 4});
              }),
      op_case("view without elements", {sample({0, 4})},
              [](const Tensors& x) {
                return x[0].view({0, 2, 2});
              }),
      op_case("permute", {cube},
              [](const Tensors& x) {
                return x[0].permute({2, 0, 1}) * 2;
              }),
      op_case("t", {sample({5, 3})}, [](const Tensors& x) { return x[0].t().contiguous(); }),
      op_case("reshape of a turned one", {cube},
              [](const Tensors& x) {
                return x[0].transpose(0, 2).reshape({5, 24});
              }),
      op_case("expand", {sample({5, 1, 3})},
              [](const Tensors& x) {
                return x[0].expand({2, 5, 4, 3}) * 2;
              }),
      op_case("squeeze", {sample({5, 1, 3, 1})}, [](const Tensors& x) { return x[0].squeeze(); }),
      op_case("squeeze of one", {sample({5, 1, 3})},
              [](const Tensors& x) { return x[0].squeeze(1) + x[0].squeeze(0).sum(); }),
      op_case("unsqueeze", {sample({5, 3})}, [](const Tensors& x) { return x[0].unsqueeze(1).unsqueeze(-1); }),
      op_case("select", {cube}, [](const Tensors& x) { return x[0].select(1, 2) + x[0].select(1, -1); }),
      op_case("slice", {cube}, [](const Tensors& x) { return x[0].slice(0, 1, 3).slice(1, 0, 6, 2); }),
      op_case("narrow", {cube}, [](const Tensors& x) { return x[0].narrow(2, 1, 3); }),
      op_case("split", {cube}, [](const Tensors& x) { return x[0].split(4, 1); }),
      op_case("split_with_sizes", {cube},
              [](const Tensors& x) {
                return x[0].split_with_sizes({1, 4, 1}, 1);
              }),
      op_case("chunk", {sample({3, 4, 12})}, [](const Tensors& x) { return x[0].chunk(3, -1); }),
      op_case("unbind", {cube}, [](const Tensors& x) { return x[0].unbind(0); }),
      op_case("cat", {sample({5, 3}), sample({2, 3}, 1)},
              [](const Tensors& x) {
                return at::cat({x[0], x[1]}, 0);
              }),
      op_case("cat of three", {sample({5, 3}), sample({5, 1}, 1), sample({5, 4}, 2)},
              [](const Tensors& x) {
                return at::cat({x[0], x[1], x[2]}, 1);
              }),
      op_case("stack", {sample({5, 3}), sample({5, 3}, 1)},
              [](const Tensors& x) {
                return at::stack({x[0], x[1]}, 1);
              }),
      op_case("repeat", {sample({5, 3})},
              [](const Tensors& x) {
                return x[0].repeat({2, 1, 3});
              }),
      op_case("flip and roll", {cube}, [](const Tensors& x) { return x[0].flip({0}) + x[0].roll(1, 1); }),
      op_case("tril and triu", {sample({5, 5})}, [](const Tensors& x) { return x[0].tril() - x[0].triu(1); }),
      op_case("diagonal", {sample({5, 5, 2})}, [](const Tensors& x) { return x[0].diagonal() * 1; }),
      op_case("clone, contiguous, to", {sample({5, 3})},
              [](const Tensors& x) { return x[0].clone().contiguous().to(at::kDouble); }),
      op_case("pad", {sample({5, 3})},
              [](const Tensors& x) {
                return at::constant_pad_nd(x[0], {1, 0, 0, 2}, 0.5);
              }),
      op_case(
          "index_select, gather", {sample({5, 3}), at::tensor({4, 0, 0, 2}, on(at::kInt))},
          [](const Tensors& x) {
            return Tensors{at::index_select(x[0], 0, x[1]), at::gather(x[0], 0, x[1].unsqueeze(1)), x[0].index({x[1]})};
          }),
      op_case("select of a turned one", {sample({5, 3})},
              [](const Tensors& x) { return x[0].unsqueeze(0).transpose(0, 1).select(1, 0); }),
  });
}
