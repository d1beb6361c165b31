// Tests that the cross entropy of classes that are cut, embeddings of tables that are cut along their rows, and packing
// give what LibTorch gives in one process: on a GPU by kernels of our own, on the CPU without them. Attention with
// dropout in blocks must give on both what it gives in one block on the CPU.

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/gpu_kernels/loader.h"
#include "tessera/layers/sharded_embedding.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/ops/kernels/blocked_attention.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"
#include "tessera/placement/partition.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

// Who sets TESSERA_GPU_KERNELS to nothing asks for LibTorch's operators in their place.
bool lacks_kernels() {
  const char* const path = std::getenv("TESSERA_GPU_KERNELS");
  const bool wanted = path == nullptr || *path != '\0';
  return wanted && device().is_cuda() && gpu::kernels() == nullptr;
}
constexpr const char* kNoKernels = "libtessera_gpu.so is not there; build //gpu_kernels:tessera_gpu with CUDA's nvcc";

const std::vector<at::ScalarType> kFloating = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16};

// Says how far results may be apart whose greatest terms are 1 and which are rounded to `dtype`, `roundings` times.
struct Tolerance {
  double relative;
  double absolute;
};
Tolerance tolerance(at::ScalarType dtype, int64_t roundings = 1) {
  const auto n = static_cast<double>(roundings);
  switch (dtype) {
    case at::kDouble: return {1e-11 * n, 1e-14 * n};
    case at::kFloat: return {1e-5 * n, 1e-8 * n};
    case at::kHalf: return {1e-3 * n, 1e-7 * n};
    default: return {8e-3 * n, 1e-8 * n};
  }
}

void check_close(const at::Tensor& got, const at::Tensor& want, const Tolerance& tolerance) {
  REQUIRE(got.sizes() == want.sizes());
  CHECK(at::allclose(got.detach().cpu().to(at::kDouble), want.detach().to(at::kDouble), tolerance.relative,
                     tolerance.absolute));
}

Interval mine(int64_t size, const DeviceMesh& mesh) { return chunk_range(size, mesh.size(), mesh.local_rank(0)); }

// Returns numbers that `dtype` represents, as float64 on the host.
at::Tensor values(at::IntArrayRef sizes, at::ScalarType dtype) {
  const int64_t n = c10::multiply_integers(sizes);
  return at::arange(n, at::kDouble).mul(1.37).sin().mul(6).to(dtype).to(at::kDouble).view(sizes);
}

void check_cross_entropy(int64_t classes, at::ScalarType dtype, bool weighted, const DeviceMesh& mesh) {
  constexpr int64_t kRows = 37;
  const at::Tensor whole = values({kRows, classes}, dtype).requires_grad_();
  const at::Tensor target = at::arange(kRows).mul(5).remainder(classes);
  target[3] = -100;
  const at::Tensor weight = weighted ? at::arange(classes, at::kDouble).remainder(3).add(1) : at::Tensor();
  const at::Tensor want = at::cross_entropy_loss(whole, target, weight, at::Reduction::Mean);
  want.backward();
  const Interval here = mine(classes, mesh);
  const at::Tensor piece = whole.detach().slice(1, here.begin, here.end).to(on(dtype)).requires_grad_();
  CommCounter counter(mesh);
  const at::Tensor got =
      sharded_cross_entropy(piece, on_device(target), mesh, {.weight = on_device(weight), .classes = classes});
  got.backward();
  CHECK(counter.total() == (mesh.size() > 1 ? 2 : 0));
  check_close(got, want, tolerance(dtype == at::kDouble ? at::kDouble : at::kFloat));
  check_close(piece.grad(), whole.grad().slice(1, here.begin, here.end), tolerance(dtype));
}

void check_embedding(int64_t rows, int64_t columns, at::ScalarType dtype, std::optional<int64_t> padding,
                     const DeviceMesh& mesh) {
  CAPTURE(rows);
  const at::Tensor whole = values({rows, columns}, dtype).requires_grad_();
  const at::Tensor ids = at::arange(60).mul(7).remainder(rows).view({4, 15});
  const at::Tensor want = at::embedding(whole, ids, padding.value_or(-1));
  want.square().sum().backward();
  const Interval here = mine(rows, mesh);
  const at::Tensor piece = whole.detach().slice(0, here.begin, here.end).to(on(dtype)).requires_grad_();
  const at::Tensor got =
      sharded_embedding(on_device(ids), piece, mesh, {.num_embeddings = rows, .padding_idx = padding});
  got.square().sum().backward();
  CHECK(got.detach().cpu().to(at::kDouble).equal(want.detach()));
  check_close(piece.grad(), whole.grad().slice(0, here.begin, here.end), tolerance(dtype, 60 / rows + 2));
}

// Returns the result of attention with dropout and the gradients of query, key and value, whose numbers `dtype` can
// hold, computed in `computed` on the mesh's device, in blocks of `most` scores.
std::vector<at::Tensor> dropped_attention(const DeviceMesh& mesh, const tessera::detail::DrawKey& key,
                                          at::ScalarType dtype, at::ScalarType computed, bool causal, int64_t most) {
  const auto put = [&](const at::Tensor& t) { return t.to(at::TensorOptions(computed).device(mesh.device())); };
  std::vector<at::Tensor> in;
  for (const auto& sizes : {std::vector<int64_t>{2, 4, 9, 8}, {2, 2, 7, 8}, {2, 2, 7, 6}})
    in.push_back(put(values(sizes, dtype).div(8)).requires_grad_());
  const at::Tensor out =
      tessera::detail::blocked_attention(in[0], in[1], in[2], {},
                                         {.probability = 0.4,
                                          .causal = causal,
                                          .key = key,
                                          .scores = intern_spec(mesh, {Replicate()}, {2, 4, 9, 7}, at::kFloat),
                                          .most = most});
  out.backward(put(values(out.sizes(), dtype)));
  return {out, in[0].grad(), in[1].grad(), in[2].grad()};
}

}  // namespace

TESSERA_RANKS_TEST_CASE("the cross entropy of cut classes is that of one process", {1, 2, 3}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  const DeviceMesh mesh = tp_line();
  for (const at::ScalarType dtype : kFloating) {
    CAPTURE(c10::toString(dtype));
    for (const int64_t classes : {2, 7, 64, 1001, 9000}) {  // with 2 classes of 3 ranks one has none
      CAPTURE(classes);
      check_cross_entropy(classes, dtype, false, mesh);
    }
    check_cross_entropy(130, dtype, true, mesh);
  }
}

using OfTensor = std::function<at::Tensor(const at::Tensor&)>;

// Compares the loss of view(logits), and the gradient of what `make` makes of it, with those of one process.
void check_losses(const at::Tensor& logits, const at::Tensor& target, const CrossEntropyOptions& options,
                  const DeviceMesh& mesh, const OfTensor& make, const OfTensor& view = at::alias) {
  const at::Tensor whole = view(logits).detach().requires_grad_();
  const int64_t classes = whole.size(-1);
  const at::Tensor flat =
      at::cross_entropy_loss(whole.flatten(0, -2), target.flatten(), {}, options.reduction, options.ignore_index);
  const at::Tensor want = options.reduction == at::Reduction::None ? flat.view(target.sizes()) : flat;
  make(want).backward();
  const Interval here = mine(classes, mesh);
  const at::Tensor piece = view(on_device(logits)).slice(-1, here.begin, here.end).detach().requires_grad_();
  CrossEntropyOptions of_piece = options;
  of_piece.classes = classes;
  const at::Tensor got = sharded_cross_entropy(piece, on_device(target), mesh, of_piece);
  make(got).backward();
  check_close(got, want, tolerance(at::kDouble));
  check_close(piece.grad(), whole.grad().slice(-1, here.begin, here.end), tolerance(at::kDouble));
}

TESSERA_RANKS_TEST_CASE("losses of every reduction, whatever their gradient's memory, the rows and the classes are",
                        {1, 2, 3}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  const DeviceMesh mesh = tp_line();
  const at::Tensor logits = values({9, 20}, at::kDouble);
  const at::Tensor target = at::arange(9).mul(7).remainder(20);
  const auto same = [](const at::Tensor& loss) { return loss; };
  const auto summed = [](const at::Tensor& loss) { return loss.sum(); };  // an expanded gradient
  const auto weighted = [](const at::Tensor& loss) { return (loss * at::arange(1, 10, loss.options())).sum(); };
  const auto strided = [](const at::Tensor& loss) { return at::stack({loss, loss * 2}, -1).square().sum(); };
  const auto negative = [](const at::Tensor& loss) {
    return at::imag(at::complex(at::zeros_like(loss), loss).conj()).sum();
  };
  const auto zero = [](const at::Tensor& loss) { return at::sgn(loss).sum(); };
  for (const int64_t ignored : {-100, 7}) {  // 7 is a class too
    CAPTURE(ignored);
    const auto check = [&](at::Reduction::Reduction reduction, const auto& make) {
      check_losses(logits, target, {.ignore_index = ignored, .reduction = reduction}, mesh, make);
    };
    check(at::Reduction::Mean, same);
    check(at::Reduction::Mean, negative);
    check(at::Reduction::Mean, zero);
    check(at::Reduction::Sum, same);
    check(at::Reduction::None, summed);
    check(at::Reduction::None, weighted);
    check(at::Reduction::None, strided);
    check(at::Reduction::None, negative);
  }
  check_losses(logits.slice(0, 0, 1), target.slice(0, 0, 1), {}, mesh, same);
  check_losses(logits.slice(0, 0, 1), target.slice(0, 0, 1), {.reduction = at::Reduction::None}, mesh, summed);
  check_losses(logits.t().contiguous(), target, {}, mesh, same, [](const at::Tensor& t) { return t.t(); });
  // Rows that do not flatten.
  check_losses(values({2, 5, 20}, at::kDouble), at::arange(8).view({2, 4}), {}, mesh, same,
               [](const at::Tensor& t) { return t.slice(1, 0, 4); });
  const at::Tensor none = at::full({9}, -100, at::kLong);
  check_losses(logits, none, {.reduction = at::Reduction::Sum}, mesh, same);
}

TESSERA_RANKS_TEST_CASE("rows of infinities give what LibTorch gives", {1, 2}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  const DeviceMesh mesh = tp_line();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor whole = values({5, 40}, at::kFloat).to(at::kFloat);
  whole[0].slice(0, 0, 20).fill_(-kInfinity);
  whole[1].fill_(-kInfinity);
  whole[2][7].fill_(kInfinity);
  whole[3][33].fill_(std::nan(""));
  const at::Tensor target = at::tensor({21, 3, 7, 1, 39}, at::kLong);
  const Interval here = mine(40, mesh);
  const at::Tensor got = sharded_cross_entropy(on_device(whole.slice(1, here.begin, here.end)), on_device(target), mesh,
                                               {.reduction = at::Reduction::None});
  const at::Tensor want = at::cross_entropy_loss(whole, target, {}, at::Reduction::None);
  CHECK(at::allclose(got.cpu(), want, 1e-5, 1e-5, /*equal_nan=*/true));
}

TESSERA_RANKS_TEST_CASE("the cross entropy needs memory for its gradient, and little else", {1}) {
  if (!device().is_cuda()) TESSERA_SKIP("memory is counted on a GPU alone");
  if (gpu::kernels() == nullptr) TESSERA_SKIP(kNoKernels);
  const DeviceMesh mesh = tp_line();
  constexpr int64_t kRows = 2048, kClasses = 16384;
  const at::Tensor logits = at::ones({kRows, kClasses}, on(at::kBFloat16)).requires_grad_();
  const at::Tensor target = at::zeros({kRows}, on(at::kLong));
  const auto step = [&] { sharded_cross_entropy(logits, target, mesh, {.classes = kClasses}).backward(); };
  step();
  logits.mutable_grad().reset();
  auto* const allocator = c10::getDeviceAllocator(device().type());
  const auto bytes = [&] { return allocator->getDeviceStats(mesh.device().index()).allocated_bytes[0]; };
  allocator->resetPeakStats(mesh.device().index());
  const int64_t before = bytes().current;
  step();
  const int64_t gradient = kRows * kClasses * 2;
  CHECK(bytes().peak - before <= gradient + kRows * 400);
}

TESSERA_RANKS_TEST_CASE("an embedding of a table that is cut along its rows is that of one process", {1, 2, 3}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  const DeviceMesh mesh = tp_line();
  for (const at::ScalarType dtype : kFloating) {
    CAPTURE(c10::toString(dtype));
    for (const std::optional<int64_t> padding : {std::optional<int64_t>(), std::optional<int64_t>(1)}) {
      check_embedding(40, 64, dtype, padding, mesh);
      check_embedding(41, 7, dtype, padding, mesh);
      check_embedding(2, 16, dtype, padding, mesh);  // of 3 ranks one has no row
    }
  }
}

TESSERA_RANKS_TEST_CASE("tensors of many dtypes and layouts are packed and unpacked as they were", {2, 3, 4}) {
  if (lacks_kernels()) TESSERA_SKIP(kNoKernels);
  const DeviceMesh mesh = tp_line();
  const std::vector<Placements> layouts = {{Shard(0)}, {Shard(1)}, {BlockCyclic(1, 2)}, {Replicate()}};
  std::vector<at::Tensor> whole;
  for (const at::ScalarType dtype : {at::kBool, at::kHalf, at::kFloat, at::kLong, at::kComplexDouble}) {
    for (const at::IntArrayRef sizes :
         {at::IntArrayRef({12, 64}), at::IntArrayRef({33, 57}), at::IntArrayRef({5, 9, 8})}) {
      const at::Tensor t = at::arange(c10::multiply_integers(sizes), on(at::kDouble)).remainder(101);
      whole.push_back(t.to(dtype).view(sizes));
    }
  }
  for (const Placements& from : layouts) {
    for (const Placements& to : layouts) {
      CAPTURE(to_string(from));
      CAPTURE(to_string(to));
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& t : whole) tensors.push_back(distribute_tensor(t, mesh, from));
      const std::vector<at::Tensor> moved = redistribute_many(tensors, std::vector<Placements>(tensors.size(), to));
      for (std::size_t i = 0; i < whole.size(); ++i) {
        CAPTURE(i);
        CHECK(to_local(moved[i]).equal(to_local(distribute_tensor(whole[i], mesh, to))));
        CHECK(full_tensor(redistribute(tensors[i], to)).equal(whole[i]));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("attention with dropout in blocks gives what one block gives on the host, with the same draws",
                        {1}) {
  const DeviceMesh mesh = tp_line(), host = init_device_mesh("cpu", {1}, {"tp"}, world());
  const auto key = tessera::detail::next_draw(*world());
  for (const at::ScalarType dtype : kFloating) {
    for (const bool causal : {false, true}) {
      for (const int64_t most : {1, 30, 100, 0}) {  // a head has 63 scores
        CAPTURE(dtype);
        CAPTURE(causal);
        CAPTURE(most);
        const auto got = dropped_attention(mesh, key, dtype, dtype, causal, most);
        const auto want = dropped_attention(host, key, dtype, at::kDouble, causal, 0);
        for (std::size_t i = 0; i < want.size(); ++i) {
          CAPTURE(i);
          check_close(got[i], want[i], {tolerance(dtype).relative, dtype == at::kDouble ? 1e-13 : 1e-5});
        }
      }
    }
  }
}
