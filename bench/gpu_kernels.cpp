#include "tessera/bench/gpu_kernels.h"

#include <functional>
#include <iostream>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/bench/gpu_compare.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/copies.h"
#include "tessera/dtensor/redistribute/region.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/ops/kernels/masked_rows.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"

namespace tessera::bench {
namespace {

using Body = std::function<void()>;

// Measures on one device, and divides the sizes of a GPU where it is none.
struct Bench {
  DeviceMesh mesh;
  int rounds;
  double bytes_per_us = 0;  // that a copy reads and writes

  int64_t sized(int64_t size) const { return mesh.device().is_cpu() ? size / 64 : size; }
  at::TensorOptions options(at::ScalarType dtype) const { return at::TensorOptions(dtype).device(mesh.device()); }

  void row(const std::string& name, int64_t bytes, const Body& ours, const Body& plain) const {
    const double limit_us = static_cast<double>(bytes) / bytes_per_us;
    const int calls = limit_us < 300 ? 20 : 5;  // a wait for the device, once for all of them, takes microseconds
    const Compared found = compare(mesh.device(), rounds, calls, ours, plain);
    fmt::print("{:<44}{:>12.1f}{:>12.1f}{:>9.3f}{:>12.1f}\n", name, found.ours.median, found.plain.median,
               found.ratio.median, limit_us);
    std::cout.flush();
  }
};

// Measures forward alone, and forward with backward. Forward reads the logits, backward reads them and writes as many.
void measure_cross_entropy(const Bench& bench, int64_t classes) {
  const int64_t rows = bench.sized(8192);
  const at::Tensor logits = at::randn({rows, classes}, bench.options(at::kBFloat16)).requires_grad_();
  const at::Tensor target = at::randint(classes, {rows}, bench.options(at::kLong));
  const auto ours = [&] { return sharded_cross_entropy(logits, target, bench.mesh, {.classes = classes}); };
  const auto plain = [&] { return at::cross_entropy_loss(logits, target); };
  const auto step = [&](const auto& loss) {
    loss().backward();
    logits.mutable_grad().reset();
  };
  const int64_t bytes = logits.numel() * 2;
  const std::string sizes = fmt::format("{} x {}", rows, classes);
  bench.row(
      "cross entropy " + sizes, bytes, [&] { (void)ours(); }, [&] { (void)plain(); });
  bench.row(
      "cross entropy, backward " + sizes, 3 * bytes, [&] { step(ours); }, [&] { step(plain); });
}

// Looks up ids of a vocabulary of which this rank has an eighth.
void measure_embedding(const Bench& bench) {
  const int64_t ids_count = bench.sized(8192), columns = bench.sized(8192), held = 16032, vocabulary = 8 * held;
  const at::Tensor weight = at::randn({held, columns}, bench.options(at::kBFloat16));
  const at::Tensor ids = at::randint(vocabulary, {ids_count}, bench.options(at::kLong));
  const auto plain = [&] {
    const at::Tensor elsewhere = ids.ge(held);
    (void)at::embedding(weight, ids.masked_fill(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(-1), 0);
  };
  bench.row(
      fmt::format("masked embedding {} x {}", ids_count, columns), ids_count * columns * 2 * 9 / 8,
      [&] {
        (void)detail::masked_rows(weight, ids, {one_interval(0, held), vocabulary});
      },
      plain);
}

// Measures attention with dropout, forward and backward, whose draws do not depend on the mesh, beside LibTorch's own,
// which is flash attention on a GPU.
void measure_attention(const Bench& bench) {
  constexpr double kDropped = 0.1;
  const std::vector<int64_t> sizes = {2, 16, bench.sized(4096), 64};
  std::vector<at::Tensor> plain, ours;
  for (int i = 0; i < 3; ++i) {
    plain.push_back(at::randn(sizes, bench.options(at::kBFloat16)).requires_grad_());
    ours.push_back(from_local(plain.back().detach().clone(), bench.mesh, {Replicate()}).detach().requires_grad_());
  }
  const auto step = [](const std::vector<at::Tensor>& x) {
    at::scaled_dot_product_attention(x[0], x[1], x[2], {}, kDropped).backward(at::ones_like(x[0]));
    for (const at::Tensor& each : x) each.mutable_grad().reset();
  };
  // Forward reads three and writes one, backward reads five and writes three.
  bench.row(
      fmt::format("attention with dropout {}", fmt::join(sizes, " x ")), 12 * plain[0].numel() * 2, [&] { step(ours); },
      [&] { step(plain); });
}

// Packs 256 MiB, a tensor's columns for eight ranks, by one launch or by eight copies.
void measure_packing(const Bench& bench) {
  constexpr int64_t kRanks = 8, kColumns = 4096;
  const int64_t rows = bench.sized(32768);
  const at::Tensor tensor = at::randn({rows, kColumns}, bench.options(at::kBFloat16));
  const at::Tensor packed = at::empty({tensor.numel()}, tensor.options());
  std::vector<Region> regions;
  for (int64_t i = 0; i < kRanks; ++i) {
    const int64_t width = kColumns / kRanks;
    regions.emplace_back(Tile{one_interval(0, rows), one_interval(i * width, (i + 1) * width)}, tensor.sizes().vec());
  }
  const auto pack = [&](TakeCopy take) {
    for (int64_t i = 0; i < kRanks; ++i) {
      regions[static_cast<std::size_t>(i)].pack(tensor, packed, i * tensor.numel() / kRanks, take);
    }
  };
  bench.row(
      fmt::format("packing {} x {} for {} ranks", rows, kColumns, kRanks), tensor.numel() * 4,
      [&] {
        Copies copies;
        pack(copies);
        copies.run();
      },
      [&] { pack(copy_part); });
}

// Returns the bytes per microsecond that a copy of a tensor reads and writes.
double copy_rate(const Bench& bench) {
  const at::Tensor from = at::ones({bench.sized(int64_t{1} << 30)}, bench.options(at::kByte));
  at::Tensor to = at::empty_like(from);
  const Body copy = [&] { to.copy_(from); };
  return 2 * static_cast<double>(from.nbytes()) / compare(bench.mesh.device(), bench.rounds, 5, copy, copy).ours.median;
}

}  // namespace

void measure_kernels(const std::string& device, int rounds) {
  Bench bench{init_device_mesh(device, {1}, {"tp"}, World::create({})), rounds};
  bench.bytes_per_us = copy_rate(bench);
  fmt::print("a copy of device memory reads and writes {:.2f} TB/s, which sets the limits\n", bench.bytes_per_us / 1e6);
  fmt::print("{:<44}{:>12}{:>12}{:>9}{:>12}\n", "kernels, bfloat16", "ours, us", "plain, us", "ratio", "limit, us");
  for (const int64_t classes : {16032, 128256}) measure_cross_entropy(bench, bench.sized(classes));
  measure_embedding(bench);
  measure_attention(bench);
  measure_packing(bench);
}

}  // namespace tessera::bench
