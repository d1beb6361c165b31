#include "tessera/mesh/collectives/collectives.h"

#include <iterator>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using tessera::testing::check_refused;
using tessera::testing::device;
using tessera::testing::device_name;
using tessera::testing::on;
using tessera::testing::world;

namespace {

const std::vector<at::ScalarType> kAll = {
    at::kBool,     at::kByte,          at::kChar,   at::kShort,        at::kInt,           at::kLong,   at::kHalf,
    at::kBFloat16, at::kFloat,         at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kUInt16, at::kUInt32,
    at::kUInt64,   at::kFloat8_e4m3fn, at::kHalf,   at::kFloat8_e5m2,  at::kComplexHalf};
const std::vector<at::ScalarType> kReal = {at::kByte,        at::kChar,     at::kShort, at::kInt,    at::kLong,
                                           at::kHalf,        at::kBFloat16, at::kFloat, at::kDouble, at::kFloat8_e4m3fn,
                                           at::kFloat8_e5m2, at::kUInt16,   at::kUInt32};

DeviceMesh line() { return init_device_mesh(device_name(), {world()->size()}, {"tp"}, world()); }

// Returns what a rank holds: small whole numbers, different on every rank, exact in every dtype.
at::Tensor held(int64_t rank, at::ScalarType dtype, at::IntArrayRef shape = {2, 3}) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return ((at::arange(count, on(at::kLong)) * (rank + 1) + rank) % 4).reshape(shape).to(dtype);
}

// Compares bytes, so that every dtype can be compared.
bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.numel() == 0) return true;
  return at::equal(a.contiguous().flatten().view(at::kByte), b.contiguous().flatten().view(at::kByte));
}

at::Tensor combined_bits(const at::Tensor& rows, ReduceOp op) {
  at::Tensor out = rows[0];
  for (int64_t i = 1; i < rows.size(0); ++i) {
    out = op == ReduceOp::kBitAnd  ? at::bitwise_and(out, rows[i])
          : op == ReduceOp::kBitOr ? at::bitwise_or(out, rows[i])
                                   : at::bitwise_xor(out, rows[i]);
  }
  return out;
}

// Says whether numbers of this dtype, which is in kReal, are reduced by `op`.
bool is_defined(ReduceOp op, at::ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/false) ? op != ReduceOp::kAvg : !is_bitwise(op);
}

// Returns the reduction, computed in float64 on the host, of what all ranks hold, in the dtype. (A GPU's mean
// multiplies by 1 / n.) Bits are combined in int64.
at::Tensor reduced(ReduceOp op, at::ScalarType dtype, at::IntArrayRef shape = {2, 3}) {
  std::vector<at::Tensor> all;
  for (int64_t rank = 0; rank < world()->size(); ++rank) all.push_back(held(rank, dtype, shape).cpu().to(at::kDouble));
  const at::Tensor rows = at::stack(all);
  const at::Tensor result = is_bitwise(op)         ? combined_bits(rows.to(at::kLong), op)
                            : op == ReduceOp::kSum ? rows.sum(0)
                            : op == ReduceOp::kAvg ? rows.mean(0)
                            : op == ReduceOp::kMax ? std::get<0>(rows.max(0))
                            : op == ReduceOp::kMin ? std::get<0>(rows.min(0))
                                                   : rows.prod(0);
  return result.to(dtype).to(device());
}

}  // namespace

TESSERA_RANKS_TEST_CASE("all_gather brings every rank's tensor, of every dtype", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const at::ScalarType dtype : kAll) {
    CAPTURE(c10::toString(dtype));
    const at::Tensor rows = all_gather(held(world()->rank(), dtype), mesh, 0);
    CHECK(rows.sizes() == at::IntArrayRef({world()->size(), 2, 3}));
    for (int64_t rank = 0; rank < world()->size(); ++rank) CHECK(same(rows[rank], held(rank, dtype)));
  }
  // Large tensors are gathered by another algorithm.
  const at::Tensor large = all_gather(held(world()->rank(), at::kInt, {100000}), mesh, 0);
  for (int64_t rank = 0; rank < world()->size(); ++rank) CHECK(same(large[rank], held(rank, at::kInt, {100000})));
  CHECK(all_gather(at::scalar_tensor(world()->rank(), on(at::kLong)), mesh, -1).sum().item<int64_t>() ==
        world()->size() * (world()->size() - 1) / 2);
}

TESSERA_RANKS_TEST_CASE("all_reduce and reduce_scatter agree with the reduction in one process", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  for (const ReduceOp op : kPlainReductions) {
    for (const at::ScalarType dtype : kReal) {
      if (!is_defined(op, dtype)) continue;
      CAPTURE(to_string(op));
      CAPTURE(c10::toString(dtype));
      CHECK(same(all_reduce(held(world()->rank(), dtype), mesh, 0, op), reduced(op, dtype)));
      const at::Tensor piece = reduce_scatter(held(world()->rank(), dtype, {n, 5}), mesh, 0, op);
      CHECK(same(piece, reduced(op, dtype, {n, 5})[world()->rank()]));
    }
  }
}

TESSERA_RANKS_TEST_CASE("collectives take a mesh dimension by its name", {1, 4}) {
  const int64_t n = world()->size();
  const DeviceMesh mesh = init_device_mesh(device_name(), {n == 4 ? 2 : 1, n == 4 ? 2 : 1}, {"dp", "tp"}, world());
  const at::Tensor here = held(world()->rank(), at::kDouble);
  CHECK(same(all_reduce(here, mesh, "tp", ReduceOp::kSum), all_reduce(here, mesh, 1, ReduceOp::kSum)));
  CHECK(same(all_gather(here, mesh, "dp"), all_gather(here, mesh, 0)));
  barrier(mesh, "tp");
  const auto wrong = [&] { all_reduce(here, mesh, "cp", ReduceOp::kSum); };
  CHECK_THROWS_WITH_AS(wrong(), doctest::Contains("has no mesh dimension 'cp'; there are: dp, tp"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("bool and complex are reduced where that means something", {2, 3}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  const at::Tensor mine = at::arange(3, on(at::kLong)) == world()->rank();
  CHECK(same(all_reduce(mine, mesh, 0, ReduceOp::kMax), at::arange(3, on(at::kLong)) < n));
  CHECK(same(all_reduce(mine, mesh, 0, ReduceOp::kMin), at::zeros({3}, on(at::kBool))));
  CHECK(same(all_reduce(mine, mesh, 0, ReduceOp::kBitOr), at::arange(3, on(at::kLong)) < n));
  CHECK(same(all_reduce(mine, mesh, 0, ReduceOp::kBitXor), at::arange(3, on(at::kLong)) < n));
  CHECK(same(all_reduce(mine, mesh, 0, ReduceOp::kBitAnd), at::zeros({3}, on(at::kBool))));
  CHECK(same(reduce_scatter(at::ones({n, 2}, on(at::kBool)), mesh, 0, ReduceOp::kMin), at::ones({2}, on(at::kBool))));
  const at::Tensor z = at::complex(at::full({2}, 1.0, on(at::kDouble)), at::full({2}, 1.0, on(at::kDouble)));
  const at::Tensor total = z * static_cast<double>(n);
  CHECK(same(all_reduce(z, mesh, 0, ReduceOp::kSum), total));
  CHECK(same(all_reduce(z, mesh, 0, ReduceOp::kAvg), z));
  CHECK(same(all_reduce(z, mesh, 0, ReduceOp::kProduct), at::pow(z, n).mul(0).add(n == 2 ? z * z : z * z * z)));
  const at::Tensor rows = z.expand({n, 2});
  CHECK(same(reduce_scatter(rows, mesh, 0, ReduceOp::kSum), total));
  CHECK(same(reduce_scatter(rows, mesh, 0, ReduceOp::kProduct), n == 2 ? z * z : z * z * z));
}

TESSERA_RANKS_TEST_CASE("max and min keep a NaN of any sign on any rank, infinities and the sign of zero", {2, 3}) {
  const DeviceMesh mesh = line();
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    CAPTURE(c10::toString(dtype));
    const at::Tensor first =
        at::tensor({nan, 1.0, -1.0, -infinity, -0.0, 3.0, -nan, 1e-3, -2.0}, on(at::kDouble)).to(dtype);
    const at::Tensor others =
        at::tensor({1.0, nan, -nan, infinity, -0.0, -4.0, -infinity, -1e-3, -5.0}, on(at::kDouble)).to(dtype);
    const at::Tensor mine = world()->rank() == 0 ? first : others;
    const at::Tensor rows = at::stack({first, others});
    for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
      const at::Tensor want = op == ReduceOp::kMax ? at::amax(rows, {0}) : at::amin(rows, {0});
      const at::Tensor got = all_reduce(mine, mesh, 0, op);
      CHECK(at::allclose(got, want, 0, 0, /*equal_nan=*/true));
      CHECK(got[4].signbit().item<bool>());
      const at::Tensor scattered = reduce_scatter(mine.unsqueeze(0).repeat({mesh.size(0), 1}), mesh, 0, op);
      CHECK(at::allclose(scattered, want, 0, 0, /*equal_nan=*/true));
    }
  }
}

TESSERA_RANKS_TEST_CASE("small integers wrap as in one process", {2}) {
  const DeviceMesh mesh = line();  // it sets the device that on() means
  const at::Tensor big = at::full({2}, 100, on(at::kChar));
  CHECK(same(all_reduce(big, mesh, 0, ReduceOp::kSum), big + big));
}

TESSERA_RANKS_TEST_CASE("all_to_all moves uneven pieces, empty ones too", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  const int64_t me = world()->rank();
  // Rank i sends (i + 2 j) % 3 elements of value 10 i + j to rank j.
  const auto count = [](int64_t from, int64_t to) { return (from + 2 * to) % 3; };
  for (const at::ScalarType dtype : kAll) {
    CAPTURE(c10::toString(dtype));
    std::vector<int64_t> send;
    std::vector<int64_t> receive;
    std::vector<at::Tensor> pieces;
    std::vector<at::Tensor> expected;
    for (int64_t other = 0; other < n; ++other) {
      send.push_back(count(me, other));
      receive.push_back(count(other, me));
      pieces.push_back(at::full({send.back()}, 10 * me + other, on(at::kLong)));
      expected.push_back(at::full({receive.back()}, 10 * other + me, on(at::kLong)));
    }
    const at::Tensor got = all_to_all(at::cat(pieces).to(dtype), send, receive, mesh, 0);
    CHECK(same(got, at::cat(expected).to(dtype)));
  }
}

TESSERA_RANKS_TEST_CASE("all_gather and reduce_scatter by counts move uneven pieces, an empty one too", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  const int64_t me = world()->rank();
  for (const int64_t scale : {1, 50000}) {  // large tensors are gathered by another algorithm
    CAPTURE(scale);
    std::vector<int64_t> counts;  // 1, 0, 2, 1
    int64_t sum = 0, before_me = 0;
    for (int64_t rank = 0; rank < n; ++rank) {
      counts.push_back((2 * rank + 1) % 3 * scale);
      sum += counts.back();
      if (rank < me) before_me += counts.back();
    }
    const int64_t mine = counts[static_cast<std::size_t>(me)];
    for (const at::ScalarType dtype : kAll) {
      if (scale > 1 && dtype != at::kInt) continue;
      CAPTURE(c10::toString(dtype));
      std::vector<at::Tensor> pieces;
      for (int64_t rank = 0; rank < n; ++rank) {
        pieces.push_back(held(rank, at::kLong, {counts[static_cast<std::size_t>(rank)]}));
      }
      CHECK(same(all_gather(held(me, dtype, {mine}), counts, mesh, 0), at::cat(pieces).to(dtype)));
    }
    for (const ReduceOp op : kPlainReductions) {
      for (const at::ScalarType dtype : kReal) {
        if (!is_defined(op, dtype) || (scale > 1 && dtype != at::kInt)) continue;
        CAPTURE(to_string(op));
        CAPTURE(c10::toString(dtype));
        const at::Tensor piece = reduce_scatter(held(me, dtype, {sum}), counts, mesh, 0, op);
        CHECK(same(piece, reduced(op, dtype, {sum}).narrow(0, before_me, mine)));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("permute, and exchanges that are started before they are waited for", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  const int64_t me = world()->rank();
  const int64_t next = (me + 1) % n, previous = (me + n - 1) % n;
  // Rank i sends i + 1 elements of value i to the rank after it.
  std::vector<int64_t> send(static_cast<std::size_t>(n), 0), receive(static_cast<std::size_t>(n), 0);
  send[static_cast<std::size_t>(next)] = me + 1;
  receive[static_cast<std::size_t>(previous)] = previous + 1;
  // In the all_to_all it sends (i + 2 j) % 3 elements of value 10 i + j to rank j.
  const auto count = [](int64_t from, int64_t to) { return (from + 2 * to) % 3; };
  std::vector<int64_t> give, take;
  std::vector<at::Tensor> given, taken;
  for (int64_t other = 0; other < n; ++other) {
    give.push_back(count(me, other));
    take.push_back(count(other, me));
    given.push_back(at::full({give.back()}, 10 * me + other, on(at::kLong)));
    taken.push_back(at::full({take.back()}, 10 * other + me, on(at::kLong)));
  }
  CommCounter counter(mesh);
  for (const at::ScalarType dtype : kAll) {
    CAPTURE(c10::toString(dtype));
    const at::Tensor mine = at::full({me + 1}, me, on(at::kLong)).to(dtype);
    const at::Tensor expected = at::full({previous + 1}, previous, on(at::kLong)).to(dtype);
    CHECK(same(permute(mine, send, receive, mesh, 0), expected));
    PendingCollective all = start_all_to_all(at::cat(given).to(dtype), give, take, mesh, 0);
    PendingCollective one = start_permute(mine, send, receive, mesh, 0);
    CHECK(same(all.wait(), at::cat(taken).to(dtype)));
    CHECK(same(one.wait(), expected));
  }
  const int64_t calls = n == 1 ? 0 : std::ssize(kAll);
  CHECK(counter.count("permute") == 2 * calls);
  CHECK(counter.count("all_to_all") == calls);
  CHECK(counter.total() == 3 * calls);
}

TESSERA_RANKS_TEST_CASE("a rank that neither sends nor receives takes part in an all_to_all", {3}) {
  const DeviceMesh mesh = line();
  // Ranks 0 and 2 exchange; rank 1 has nothing.
  const int64_t me = world()->rank();
  const std::vector<int64_t> counts = me == 1   ? std::vector<int64_t>{0, 0, 0}
                                      : me == 0 ? std::vector<int64_t>{0, 0, 4}
                                                : std::vector<int64_t>{4, 0, 0};
  const at::Tensor got = all_to_all(at::full({me == 1 ? 0 : 4}, me, on(at::kFloat)), counts, counts, mesh, 0);
  CHECK(same(got, me == 1 ? at::empty({0}, on(at::kFloat)) : at::full({4}, 2 - me, on(at::kFloat))));
}

TESSERA_RANKS_TEST_CASE("a wrong scatter on a mesh dimension of one rank is this rank's error alone", {2}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world());
  const at::Tensor like = at::ones({3}, on(at::kFloat));
  if (world()->rank() == 0) {
    check_refused([&] { scatter(at::ones({1, 4}, on(at::kFloat)), like, mesh, 1, 0); }, "scatter: the source's input");
  }
  CHECK(same(all_reduce(like, mesh, 0, ReduceOp::kSum), like + like));
}

TESSERA_RANKS_TEST_CASE("broadcast and scatter bring the source's values, from every source", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  const int64_t me = world()->rank();
  for (int64_t source = 0; source < n; ++source) {
    for (const at::ScalarType dtype : kAll) {
      CAPTURE(c10::toString(dtype));
      CHECK(same(broadcast(held(me, dtype), mesh, 0, source), held(source, dtype)));
      const at::Tensor rows = me == source ? held(source, dtype, {n, 2, 2}) : at::Tensor();
      CHECK(same(scatter(rows, at::empty({2, 2}, on(dtype)), mesh, 0, source), held(source, dtype, {n, 2, 2})[me]));
    }
  }
  barrier(mesh, 0);
}

TESSERA_RANKS_TEST_CASE("any strides and lazy conjugates go in, contiguous tensors come out, and the input stays",
                        {2}) {
  const DeviceMesh mesh = line();
  const int64_t me = world()->rank();
  const at::Tensor base = at::arange(12, on(at::kDouble)).reshape({3, 4}) + me;
  const at::Tensor turned = base.t();
  const at::Tensor before = turned.clone();
  const at::Tensor sum = all_reduce(turned, mesh, 0, ReduceOp::kSum);
  CHECK(sum.is_contiguous());
  CHECK(same(sum, (at::arange(12, on(at::kDouble)).reshape({3, 4}) * 2 + 1).t()));
  CHECK(same(all_gather(turned, mesh, 0)[1 - me], (base - me + (1 - me)).t()));
  CHECK(same(broadcast(turned, mesh, 0, 1), (base - me + 1).t()));
  CHECK(same(turned, before));
  const at::Tensor z = at::complex(at::ones({2}, on(at::kFloat)), at::full({2}, float(me + 1), on(at::kFloat)));
  CHECK(same(all_gather(z.conj(), mesh, 0)[1],
             at::complex(at::ones({2}, on(at::kFloat)), at::full({2}, -2.f, on(at::kFloat)))));
}

TESSERA_RANKS_TEST_CASE("complex numbers of 32 bits are reduced, few and many", {2, 3}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  const auto filled = [&](at::IntArrayRef shape, double value) {
    return at::full(shape, value, on(at::kFloat)).to(at::kComplexHalf);
  };
  for (const int64_t count : {int64_t{4}, int64_t{1} << 20}) {
    CAPTURE(count);
    const at::Tensor mine = filled({count}, static_cast<double>(world()->rank() + 1));
    const auto sum = static_cast<double>(n * (n + 1) / 2);
    CHECK(same(all_reduce(mine, mesh, 0, ReduceOp::kSum), filled({count}, sum)));
    CHECK(same(reduce_scatter(mine.expand({n, count}), mesh, 0, ReduceOp::kSum), filled({count}, sum)));
    CHECK(same(all_reduce(mine, mesh, 0, ReduceOp::kAvg), filled({count}, sum / static_cast<double>(n))));
  }
}

TESSERA_RANKS_TEST_CASE("no gradient passes a collective, and inference mode is fine", {1, 2}) {
  const DeviceMesh mesh = line();
  at::Tensor input = at::ones({2}, on(at::kFloat));
  input.requires_grad_(true);
  CHECK_FALSE(all_reduce(input * 2, mesh, 0, ReduceOp::kSum).requires_grad());
  CHECK_FALSE(all_gather(input, mesh, 0).requires_grad());
  CHECK_FALSE(broadcast(input, mesh, 0, 0).requires_grad());
  const auto n = static_cast<float>(world()->size());
  const c10::InferenceMode inference;
  CHECK(all_reduce(at::ones({2}, on(at::kFloat)), mesh, 0, ReduceOp::kSum).sum().item<float>() == 2 * n);
  const at::Tensor rows = at::ones({world()->size(), 2}, on(at::kFloat));
  CHECK(reduce_scatter(rows, mesh, 0, ReduceOp::kAvg).sum().item<float>() == 2);
}

TESSERA_RANKS_TEST_CASE("each mesh dimension has its own groups, and a slice shares them", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  const at::Tensor mine = at::full({1}, world()->rank(), on(at::kLong));
  const int64_t d = mesh.local_rank("dp");
  const int64_t t = mesh.local_rank("tp");
  CHECK(all_reduce(mine, mesh, 0, ReduceOp::kSum).item<int64_t>() == t + (t + 2));
  CHECK(all_reduce(mine, mesh, 1, ReduceOp::kSum).item<int64_t>() == 2 * d + (2 * d + 1));
  CHECK(all_reduce(mine, mesh["tp"], 0, ReduceOp::kSum).item<int64_t>() == 4 * d + 1);
  CHECK(mesh["tp"].group(0) == mesh.group("tp"));
  const DeviceMesh turned = mesh[{"tp", "dp"}];
  CHECK(all_reduce(mine, turned, 0, ReduceOp::kSum).item<int64_t>() == 4 * d + 1);
  CHECK(turned.group(1) == mesh.group(0));
}

TESSERA_RANKS_TEST_CASE("a mesh over a part of the world, in any order of ranks", {4}) {
  const DeviceMesh mesh(world(), device().type(), Mesh({3}, {"tp"}, {3, 0, 2}));
  const at::Tensor mine = at::full({1}, world()->rank(), on(at::kLong));
  if (world()->rank() == 1) {
    CHECK_FALSE(mesh.is_member());
    check_refused([&] { all_reduce(mine, mesh, 0, ReduceOp::kSum); },
                  "all_reduce: rank 1 is outside mesh {tp: 3} over ranks [3, 0, 2]");
    check_refused([&] { barrier(mesh, 0); }, "barrier: rank 1 is outside mesh");
    check_refused([&] { mesh.group(0); }, "rank 1 is outside mesh");
    return;
  }
  CHECK(same(all_gather(mine, mesh, 0).flatten(), at::tensor({3, 0, 2}, on(at::kLong))));
  CHECK(broadcast(mine, mesh, 0, 0).item<int64_t>() == 3);
}

TESSERA_RANKS_TEST_CASE("collectives are counted by kind, mesh dimension, operator and path", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  CommCounter counter(mesh);
  const std::string path = "layers.0.w2.weight";
  {
    const World::Scope scope(*world(), "aten::mm", &path);
    all_reduce(at::ones({8}, on(at::kFloat)), mesh, 1, ReduceOp::kSum);
    all_reduce(at::ones({8}, on(at::kFloat)), mesh, 1, ReduceOp::kSum);
  }
  all_gather(at::ones({2}, on(at::kDouble)), mesh, 0);
  reduce_scatter(at::ones({2, 3}, on(at::kFloat)), mesh, 0, ReduceOp::kSum);
  barrier(mesh, 0);
  CHECK(counter.total() == 5);
  CHECK(counter.count("all_reduce") == 2);
  CHECK(counter.bytes("all_reduce") == 64);
  CHECK(counter.bytes("all_gather") == 16);
  CHECK(counter.bytes("reduce_scatter") == 24);
  CHECK(counter.total_bytes() == 104);
  CHECK(counter.count_on("tp") == 2);
  CHECK(counter.count_on("dp") == 3);
  CHECK(counter.count_by_op("aten::mm") == 2);
  CHECK(counter.count_by_path(path) == 2);
  CHECK(counter.count_by_path("-") == 3);
  CHECK(counter.to_string().find("all_reduce      tp            2            64  aten::mm  layers.0.w2.weight\n") !=
        std::string::npos);
  counter.reset();
  CHECK(counter.total() == 0);
}

TESSERA_RANKS_TEST_CASE("one rank and empty tensors communicate nothing, and are checked all the same", {1, 2}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  CommCounter counter(mesh);
  CHECK(all_gather(at::empty({0, 3}, on(at::kFloat)), mesh, 0).sizes() == at::IntArrayRef({n, 0, 3}));
  CHECK(same(all_reduce(at::empty({0, 3}, on(at::kHalf)), mesh, 0, ReduceOp::kSum), at::empty({0, 3}, on(at::kHalf))));
  CHECK(reduce_scatter(at::empty({n, 0}, on(at::kFloat)), mesh, 0, ReduceOp::kMax).sizes() == at::IntArrayRef({0}));
  CHECK(broadcast(at::empty({0}, on(at::kFloat)), mesh, 0, 0).numel() == 0);
  CHECK(scatter(at::empty({n, 0}, on(at::kFloat)), at::empty({0}, on(at::kFloat)), mesh, 0, 0).numel() == 0);
  CHECK(counter.total() == 0);
  check_refused([&] { all_reduce(at::empty({0}, on(at::kInt)), mesh, 0, ReduceOp::kAvg); },
                "all_reduce: avg of Int is not defined");
  if (n > 1) return;
  CHECK(same(all_to_all(at::arange(3, on(at::kLong)), {3}, {3}, mesh, 0), at::arange(3, on(at::kLong))));
  CHECK(same(reduce_scatter(at::ones({1, 2}, on(at::kFloat)), mesh, 0, ReduceOp::kAvg), at::ones({2}, on(at::kFloat))));
  barrier(mesh, 0);
  CHECK(counter.total() == 0);
  CHECK(mesh.group(0) == mesh.group(0));
}

TESSERA_RANKS_TEST_CASE("bad arguments are refused on every rank, before anything is sent", {1, 2}) {
  const DeviceMesh mesh = line();
  const int64_t n = world()->size();
  CommCounter counter(mesh);
  const at::Tensor x = at::ones({3}, on(at::kFloat));
  check_refused([&] { all_gather(at::Tensor(), mesh, 0); }, "all_gather: the tensor is undefined");
  check_refused([&] { all_gather(x.to_sparse(), mesh, 0); },
                fmt::format("all_gather: a sparse tensor on {} cannot be sent", x.device().str()));
  check_refused([&] { broadcast(x.to_sparse(), mesh, 0, 0); }, "; give a dense one, to_dense()");
  check_refused([&] { all_gather(at::quantize_per_tensor(x, 1.0, 0, at::kQInt8), mesh, 0); },
                "all_gather: a quantized tensor of QInt8 cannot be sent; send its int_repr(), or dequantize it first");
  check_refused([&] { all_gather(x.to(at::kMeta), mesh, 0); }, "dense tensor on meta cannot be sent on mesh {tp: ");
  // This tensor is made as a DTensor is.
  at::Tensor bare(c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3),
                                                       c10::scalarTypeToTypeMeta(at::kFloat), c10::Device(c10::kCPU)));
  bare.unsafeGetTensorImpl()->set_sizes_contiguous({n});
  const char* const no_data =
      ": the tensor has no data of its own; a DTensor communicates by redistribute() or full_tensor()";
  check_refused([&] { all_gather(bare, mesh, 0); }, no_data);
  check_refused([&] { all_reduce(bare, mesh, 0, ReduceOp::kSum); }, no_data);
  check_refused([&] { reduce_scatter(bare, mesh, 0, ReduceOp::kSum); }, no_data);
  check_refused([&] { broadcast(bare, mesh, 0, 0); }, no_data);
  check_refused([&] { scatter(x, bare, mesh, 0, 0); }, no_data);
  check_refused([&] { all_gather(x, mesh, 1); }, "mesh dimension 1 is out of range");
  check_refused([&] { all_reduce(x.to(at::kLong), mesh, 0, ReduceOp::kAvg); },
                "avg of Long is not defined; use sum and divide");
  check_refused([&] { all_reduce(x > 0, mesh, 0, ReduceOp::kSum); },
                "sum of Bool is not defined; use max (any) or min (all)");
  check_refused([&] { all_reduce(x > 0, mesh, 0, ReduceOp::kProduct); }, "product of Bool");
  check_refused([&] { all_reduce(x.to(at::kComplexFloat), mesh, 0, ReduceOp::kMax); }, "complex numbers have no order");
  check_refused([&] { all_reduce(x.to(at::kUInt64), mesh, 0, ReduceOp::kSum); }, "sum of UInt64 is not defined");
  check_refused(
      [&] {
        reduce_scatter(at::ones({n + 1, 2}, on(at::kFloat)), mesh, 0, ReduceOp::kSum);
      },
      "rows, one for each rank of mesh dimension tp");
  check_refused([&] { reduce_scatter(at::scalar_tensor(1, on(at::kFloat)), mesh, 0, ReduceOp::kSum); },
                "reduce_scatter: input of shape () needs");
  check_refused([&] { broadcast(x, mesh, 0, n); }, "pass the coordinate there, not the global rank");
  check_refused([&] { broadcast(x, mesh, 0, -1); }, "broadcast: source -1 is outside [0, ");
  check_refused([&] { scatter(x, x, mesh, 0, n); }, "scatter: source");
  CHECK(counter.total() == 0);
}

TEST_CASE("counts that do not fit the ranks or the input are refused before anything is sent") {
  for (const int64_t n : {1, 2}) {
    CAPTURE(n);
    // A refusal fails its world, since it may be one of this rank alone.
    const auto refused = [&](const std::function<void(const DeviceMesh& mesh)>& call, const std::string& text) {
      const DeviceMesh mesh = init_device_mesh("cpu", {n}, {"tp"}, World::fake(0, n));
      const CommCounter counter(mesh);
      check_refused([&] { call(mesh); }, text);
      CHECK(counter.total() == 0);
    };
    const std::vector<int64_t> ones(static_cast<std::size_t>(n), 1), none(static_cast<std::size_t>(n), -1);
    const auto filled = [](at::IntArrayRef sizes) { return at::ones(sizes, at::kFloat); };
    const at::Tensor x = filled({2});
    refused([&](const DeviceMesh& mesh) { all_to_all(filled({n + 1}), ones, ones, mesh, 0); },
            "all_to_all: input of shape");
    refused(
        [&](const DeviceMesh& mesh) {
          all_to_all(filled({1, n}), ones, ones, mesh, 0);
        },
        "a 1-D input whose size is the sum of the send counts");
    refused(
        [&](const DeviceMesh& mesh) {
          all_to_all(filled({1}), {1, 0, 0}, ones, mesh, 0);
        },
        "send counts [1, 0, 0]");
    refused([&](const DeviceMesh& mesh) { all_to_all(filled({n}), ones, none, mesh, 0); }, "receive counts [-1");
    refused([&](const DeviceMesh& mesh) { permute(filled({n + 1}), ones, ones, mesh, 0); }, "permute: input of shape");
    const std::string for_ranks = fmt::format(" for {} ranks on mesh dimension tp; give each one of at least 0", n);
    refused(
        [&](const DeviceMesh& mesh) {
          all_gather(x, {1, 1, 1}, mesh, 0);
        },
        "all_gather: counts [1, 1, 1]" + for_ranks);
    refused([&](const DeviceMesh& mesh) { all_gather(x, none, mesh, 0); }, for_ranks);
    refused([&](const DeviceMesh& mesh) { all_gather(x, ones, mesh, 0); },
            "all_gather: input of shape (2) where counts [1");
    refused(
        [&](const DeviceMesh& mesh) {
          all_gather(x.view({2, 1}), ones, mesh, 0);
        },
        "give this rank 1; pass it flat");
    const auto scatter_sum = [](const at::Tensor& t, const std::vector<int64_t>& counts) {
      return [=](const DeviceMesh& mesh) { reduce_scatter(t, counts, mesh, 0, ReduceOp::kSum); };
    };
    refused(scatter_sum(x, {1, 1, 1}), "reduce_scatter: counts [1, 1, 1]" + for_ranks);
    refused(scatter_sum(filled({n + 1}), ones), fmt::format("add up to {}; pass it flat", n));
    refused(scatter_sum(filled({1, n}), ones), fmt::format("reduce_scatter: input of shape (1, {}) where counts", n));
  }
}

TESSERA_RANKS_TEST_CASE("collectives go over merged mesh dimensions in their order, under their name", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  const CommCounter counter(mesh);
  const at::Tensor mine = at::scalar_tensor(world()->rank(), on(at::kLong));
  CHECK(at::equal(all_gather(mine, mesh.merged({0, 1}), 0), at::tensor({0, 1, 2, 3}, on(at::kLong))));
  CHECK(at::equal(all_gather(mine, mesh.merged({1, 0}), 0), at::tensor({0, 2, 1, 3}, on(at::kLong))));
  CHECK(all_reduce(mine, mesh.merged({0, 1}), 0, ReduceOp::kSum).item<int64_t>() == 6);
  CHECK(counter.count_on("dp+tp") == 2);
  CHECK(counter.count_on("tp+dp") == 1);
}
