// Tests that a GPU draws what the host draws.

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/gpu_kernels/loader.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

constexpr uint64_t kSeed = (uint64_t{7} << 40) + 11;

// The host's draws come from one rank that is alone.
DeviceMesh alone() { return init_device_mesh("cpu", {1}, {"one"}, World::create({})); }

bool lacks_kernels() { return device().is_cuda() && gpu::kernels() == nullptr; }
constexpr const char* kNoKernels = "libtessera_gpu.so is not there; build //gpu_kernels:tessera_gpu with CUDA's nvcc";

const std::vector<std::vector<int64_t>> kSizes = {{7, 5}, {16, 8}, {3, 6, 4}, {1031, 257}, {4099, 64}};
const std::vector<Placements> kLayouts = {
    {Replicate()}, {Shard(0)}, {Shard(1)}, {BlockCyclic(0, 2)}, {BlockCyclic(1, 1)}};

const std::vector<at::ScalarType> kFloating = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
const std::vector<at::ScalarType> kAll = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
                                          at::kInt,   at::kShort,  at::kChar, at::kByte,     at::kBool};

struct Tolerance {
  double relative;
  double absolute;
};

// Says how far two numbers may be apart that differ by some roundings of `dtype`.
Tolerance tolerance(at::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kDouble: return {1e-12, 1e-300};
    case at::kHalf: return {4e-3, 1e-6};
    case at::kBFloat16: return {3e-2, 1e-30};
    default: return {1e-5, 1e-30};
  }
}

void check_close(const at::Tensor& got, const at::Tensor& want) {
  const auto [relative, absolute] = tolerance(want.scalar_type());
  const bool complex = want.is_complex();
  const at::Tensor g = (complex ? at::view_as_real(got) : got).to(at::kDouble);
  const at::Tensor w = (complex ? at::view_as_real(want) : want).to(at::kDouble);
  CHECK((g - w).abs().le(w.abs() * relative + absolute).all().item<bool>());
}

// Calls draw(mesh, layout, device) on this test's mesh in each layout, and on the host alone, with the same seed, and
// compares what they draw: bit by bit if `exact`.
template <class Draw>
void check_draw(bool exact, const Draw& draw) {
  const DeviceMesh host = alone();
  manual_seed(kSeed, host.world());
  const at::Tensor want = to_local(draw(host, {Replicate()}, c10::Device(at::kCPU)));
  const DeviceMesh mesh = tp_line();
  for (const Placements& layout : kLayouts) {
    CAPTURE(to_string(layout));
    manual_seed(kSeed, *world());
    const at::Tensor drawn = draw(mesh, layout, device());
    const at::Tensor got = full_tensor(drawn).cpu();
    REQUIRE((got.scalar_type() == want.scalar_type()));
    if (exact) {
      CHECK(got.equal(want));
    } else {
      check_close(got, want);
    }
  }
}

// Does the same for an operator on zeros of `dtype`, which may draw into them.
template <class Operator>
void check_operator(bool exact, at::IntArrayRef sizes, at::ScalarType dtype, const Operator& run) {
  CAPTURE(c10::toString(dtype));
  check_draw(exact, [&](const DeviceMesh& mesh, const Placements& layout, c10::Device on) {
    return run(distribute_tensor(at::zeros(sizes, at::TensorOptions(dtype).device(on)), mesh, layout));
  });
}

}  // namespace

TESSERA_RANKS_TEST_CASE("factories draw on a GPU what the host draws, in any layout", {1, 2, 3}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  for (const std::vector<int64_t>& sizes : kSizes) {
    CAPTURE(at::IntArrayRef(sizes));
    for (const at::ScalarType dtype : kFloating) {
      CAPTURE(c10::toString(dtype));
      check_draw(true, [&](const DeviceMesh& mesh, const Placements& layout, c10::Device) {
        return tessera::rand(sizes, mesh, layout, dtype);
      });
      check_draw(false, [&](const DeviceMesh& mesh, const Placements& layout, c10::Device) {
        return tessera::randn(sizes, mesh, layout, dtype);
      });
    }
    for (const at::ScalarType dtype : {at::kLong, at::kInt, at::kFloat, at::kBFloat16, at::kBool}) {
      CAPTURE(c10::toString(dtype));
      const int64_t low = dtype == at::kBool ? 0 : -3;
      const int64_t high = dtype == at::kBool ? 2 : 100;
      check_draw(true, [&](const DeviceMesh& mesh, const Placements& layout, c10::Device) {
        return tessera::randint(low, high, sizes, mesh, layout, dtype);
      });
    }
  }
}

TESSERA_RANKS_TEST_CASE("operators draw on a GPU what the host draws, in any layout", {1, 2, 3}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  for (const std::vector<int64_t>& sizes : kSizes) {
    CAPTURE(at::IntArrayRef(sizes));
    for (const at::ScalarType dtype : kAll) {
      check_operator(true, sizes, dtype, [](at::Tensor t) { return t.bernoulli_(0.3); });
    }
    check_operator(true, sizes, at::kLong, [](at::Tensor t) { return t.random_(); });
    for (const at::ScalarType dtype : kFloating) {
      check_operator(true, sizes, dtype, [](at::Tensor t) { return t.uniform_(-1, 2); });
      check_operator(true, sizes, dtype, [](const at::Tensor& t) { return at::dropout(t + 1, 0.25, true); });
      check_operator(false, sizes, dtype, [](at::Tensor t) { return t.exponential_(3); });
    }
    check_operator(true, sizes, at::kComplexFloat, [](at::Tensor t) { return t.uniform_(); });
    check_operator(false, sizes, at::kComplexDouble, [](at::Tensor t) { return t.normal_(); });
  }
}

TESSERA_RANKS_TEST_CASE("a GPU draws into tensors whose memory has another order, or begins at an odd place", {1, 2}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  const auto draws_alike = [](const auto& make) {
    check_draw(true, [&](const DeviceMesh& mesh, const Placements& layout, c10::Device on) {
      if (layout[0] != Placement(Replicate())) return distribute_tensor(make(on), mesh, layout).uniform_();
      return from_local(make(on), mesh, layout).uniform_();
    });
  };
  draws_alike([](c10::Device on) { return at::zeros({33, 14}, on).t(); });
  draws_alike([](c10::Device on) { return at::zeros({14 * 33 + 1}, on).slice(0, 1).view({14, 33}); });
  draws_alike([](c10::Device on) {
    return at::zeros({14 * 33 + 1}, at::TensorOptions(on).dtype(at::kHalf)).slice(0, 1).view({14, 33});
  });
}

TESSERA_RANKS_TEST_CASE("dropout on a GPU gives the host's results, mask and gradient bit for bit", {1, 2, 3}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  for (const at::ScalarType dtype : kFloating) {
    for (const double p : {0.1, 0.5, 0.0, 1.0}) {
      CAPTURE(p);
      check_operator(true, {67, 33}, dtype, [p](at::Tensor t) {
        t.bernoulli_(0.5);
        const at::Tensor x = t.mul(-3).add(1.25).requires_grad_();
        const auto [y, mask] = at::native_dropout(x, p, true);
        y.square().sum().backward();
        return at::cat({y.detach(), mask.to(y.scalar_type()), x.grad()}, 0);
      });
    }
    // A tensor whose memory has another order goes by LibTorch's product, and one at an odd place by narrow words.
    check_draw(true, [dtype](const DeviceMesh& mesh, const Placements& layout, c10::Device on) {
      const at::Tensor all = at::arange(33 * 14 + 1, at::TensorOptions(at::kFloat).device(on)).to(dtype);
      const at::Tensor odd = all.slice(0, 1).view({33, 14}), turned = all.slice(0, 1).view({14, 33}).t();
      const at::Tensor a = distribute_tensor(odd, mesh, layout), b = distribute_tensor(turned, mesh, layout);
      // at::dropout rounds its factor to 16 bits on the host alone.
      return at::cat({std::get<0>(at::native_dropout(a, 0.3, true)), std::get<0>(at::native_dropout(b, 0.3, true))}, 0);
    });
  }
}
