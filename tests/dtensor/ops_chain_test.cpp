// Tests seeded random chains of operators, which reach combinations of layouts that nobody would write down.

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/random.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns a random shape of `numel` elements, with some dimensions of size 1.
std::vector<int64_t> shape_of(Random& random, int64_t numel) {
  std::vector<int64_t> out;
  while (numel > 1 && out.size() < 4) {
    std::vector<int64_t> divisors;
    for (int64_t d = 2; d <= numel; ++d) {
      if (numel % d == 0) divisors.push_back(d);
    }
    out.push_back(divisors[static_cast<std::size_t>(pick(random, static_cast<int64_t>(divisors.size())))]);
    numel /= out.back();
  }
  if (numel > 1) out.push_back(numel);
  if (random() % 4 == 0) out.insert(out.begin() + pick(random, static_cast<int64_t>(out.size()) + 1), 1);
  return out;
}

// Does one step that depends only on the shape, so that plain tensors and DTensors do the same.
at::Tensor step(Random& random, const at::Tensor& x) {
  const int64_t ndim = x.dim();
  const int64_t dim = ndim > 0 ? pick(random, ndim) : 0;
  const int64_t kind = pick(random, 15);
  if (kind == 0 || ndim == 0) return x.reshape(shape_of(random, x.numel()));
  switch (kind) {
    case 1: return x.transpose(dim, pick(random, ndim));
    case 2: return x.reshape(shape_of(random, x.numel())).contiguous();
    case 3: return x.size(dim) > 2 ? x.slice(dim, 1) : x.unsqueeze(dim);
    case 4: return at::softmax(x, dim);
    case 5: return ndim > 1 ? x.sum(dim) : x * 2;
    case 6: return ndim > 1 ? x.mean(dim, true) + x : x + 0.5;
    case 7: return at::tanh(x);
    case 8: return x * x;
    case 9: return x.numel() < 100 ? at::cat({x, x * 2}, dim) : x.neg();
    case 10:
      return ndim > 1 ? at::matmul(x.reshape({x.size(0), -1}), x.reshape({x.size(0), -1}).t()).div(x.numel()) : x / 2;
    case 11: return at::layer_norm(x, {x.size(-1)});
    case 12: return x.clone().add_(1).mul_(0.5);
    case 13: return ndim > 1 ? x.flatten(0, 1) : x.view({1, -1});
    default: return x.amax(dim, true) - x;
  }
}

OpCase chain(unsigned seed, int64_t length) {
  Random shapes(seed);
  const int64_t numel = std::vector<int64_t>{12, 24, 30, 36, 40}[seed % 5];
  return op_case("chain " + std::to_string(seed), {sample(shape_of(shapes, numel), seed)},
                 [seed, length](const Tensors& x) {
                   Random random(seed + 1000);
                   at::Tensor y = x[0];
                   for (int64_t i = 0; i < length; ++i) y = step(random, y);
                   return y;
                 });
}

}  // namespace

TESSERA_RANKS_TEST_CASE("reshapes of every kind", {2, 3, 4}) {
  std::vector<OpCase> cases;
  Random random(7);
  for (int i = 0; i < 40; ++i) {
    const int64_t numel = std::vector<int64_t>{12, 24, 30, 36}[static_cast<std::size_t>(i) % 4];
    const auto from = shape_of(random, numel);
    const auto to = shape_of(random, numel);
    cases.push_back(op_case("reshape " + std::to_string(i), {sample(from)},
                            [to](const Tensors& x) { return x[0].reshape(to) * 2; }));
  }
  check_ops(cases, 8);
}

TESSERA_RANKS_TEST_CASE("chains of operators", {2, 3, 4}) {
  std::vector<OpCase> cases;
  for (unsigned seed = 0; seed < 60; ++seed) cases.push_back(chain(seed, 2 + seed % 5));
  check_ops(cases, 4);
}
