// Tests calls at the limits of what rules, kernels and kept tensors support; each once gave a wrong result.

#include <limits>
#include <stdexcept>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/explain_op.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns a pending tensor whose term on rank i is row i.
at::Tensor terms(const at::Tensor& rows, const DeviceMesh& mesh, ReduceOp op) {
  return from_local(rows[mesh.local_rank(0)].clone(), mesh, {Partial(op)});
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, bool causal) {
  return at::scaled_dot_product_attention(q, k, v, mask, 0.0, causal);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("index_put that adds by a mask reduces extremes first", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor rows = sample({mesh.size(), 5});
  const at::Tensor mask = at::arange(5, on(at::kLong)) % 2 == 0, value = at::full({1}, 3.0, on(at::kDouble));
  const c10::List<std::optional<at::Tensor>> plain({mask}), places({spread(mask, mesh, {R})});
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kSum}) {
    const at::Tensor x = terms(rows, mesh, op);
    const at::Tensor got = at::index_put(x, places, spread(value, mesh, {R}), true);
    CHECK(close(full_tensor(got), at::index_put(full_tensor(x), plain, value, true)));
    CHECK(placements_of(got)[0].is_partial() == (op == ReduceOp::kSum));
  }
}

TESSERA_RANKS_TEST_CASE("attention of half heads under a mask of float sends nothing, where a rank has no heads too",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor q = sample({2, 2, 5, 64}, 0, at::kBFloat16), mask = sample({5, 5}, 1, at::kFloat);
  const at::Tensor heads = spread(q, mesh, {Shard(1)}), terms = spread(mask, mesh, {R});
  const CommCounter counter(mesh);
  const at::Tensor got = attend(heads, heads, heads, terms, false);
  CHECK(counter.total() == 0);
  CHECK((got.scalar_type() == at::kBFloat16));
  CHECK(at::allclose(full_tensor(got), attend(q, q, q, mask, false), /*rtol=*/0, /*atol=*/0.05));
}

TESSERA_RANKS_TEST_CASE("a reused TensorImpl does not wait for a transfer of the tensor that had it before", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::NoGradGuard no_grad;
  const at::Tensor a = spread(sample({6, 4}), mesh, {R}), b = spread(sample({6, 4}, 1), mesh, {R});
  const at::Tensor cut = spread(sample({6, 4}, 2), mesh, {S0});
  at::Tensor x = a + b;
  {
    const at::Tensor late = redistribute(cut, {R}, {.async = true});
    x.set_data(late);
  }
  x.reset();
  CHECK(close(full_tensor(a + b), sample({6, 4}) + sample({6, 4}, 1)));
}

TESSERA_RANKS_TEST_CASE("attention under a mask, causal too, where a rank has no heads, and where the sequence is cut",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor q = sample({2, 2, 5, 4}), k = sample({2, 2, 5, 4}, 1), v = sample({2, 2, 5, 4}, 2);
  const at::Tensor truths = whole_numbers({5, 5}, at::kBool).logical_or(at::eye(5, on(at::kBool)));
  for (const Placement& placement : {Shard(1), Shard(2), R}) {
    CAPTURE(to_string(placement));
    const auto cut = [&](const at::Tensor& t) { return spread(t, mesh, {placement}); };
    for (const at::Tensor& mask : {sample({5, 5}, 3), sample({2, 1, 1, 5}, 3), truths}) {
      const at::Tensor d = spread(mask, mesh, {R});
      // On a GPU LibTorch takes no mask beside a causal one.
      const at::Tensor want = on_device(attend(q.cpu(), k.cpu(), v.cpu(), mask.cpu(), true));
      CHECK(close(full_tensor(attend(cut(q), cut(k), cut(v), d, true)), want));
      if (!mask.is_floating_point()) continue;
      const at::Tensor leaf = mask.detach().clone().requires_grad_(true),
                       d_leaf = d.detach().clone().requires_grad_(true);
      attend(q, k, v, leaf, false).square().sum().backward();
      attend(cut(q), cut(k), cut(v), d_leaf, false).square().sum().backward();
      CHECK(close(full_tensor(d_leaf.grad()), leaf.grad()));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a mask that does not fit is refused, and the job goes on", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor q = spread(sample({4, 2, 4, 8}), mesh, {S0});
  const auto refused = [&](const at::Tensor& mask, const char* text) {
    CHECK_THROWS_WITH(attend(q, q, q, spread(mask, mesh, {R}), false), doctest::Contains(text));
    CHECK(full_tensor(q.sum()).dim() == 0);
  };
  refused(sample({4, 5}), "(5) at non-singleton dimension 3");
  refused(whole_numbers({4, 4}, at::kLong),
          "the mask is of Long, the query of Double; give a mask of bool, of float or of");
}

TESSERA_RANKS_TEST_CASE("an image in channels-last stays so, and can be viewed by its strides", {1, 2, 3}) {
  const auto last = [](const at::Tensor& t) { return t.contiguous(at::MemoryFormat::ChannelsLast); };
  const at::Tensor x = sample({4, 3, 8, 6});
  using Op = at::Tensor (*)(const at::Tensor&);
  constexpr Op kOps[] = {[](const at::Tensor& t) { return at::max_pool2d(t, 2); },
                         [](const at::Tensor& t) { return at::avg_pool2d(t, 2); },
                         [](const at::Tensor& t) { return at::group_norm(t, 3); },
                         [](const at::Tensor& t) { return at::roll(t, 1, 2); },
                         [](const at::Tensor& t) {
                           const at::Tensor weight = sample({5, 3, 3, 3});
                           return at::conv2d(t, is_dtensor(t) ? spread(weight, mesh_of(t), {R}) : weight);
                         },
                         [](const at::Tensor& t) {
                           return at::reflection_pad2d(t, {1, 2, 0, 1});
                         },
                         [](const at::Tensor& t) { return at::pixel_unshuffle(t, 2); },
                         [](const at::Tensor& t) {
                           return std::get<0>(at::adaptive_max_pool2d(t, {4, 3}));
                         },
                         [](const at::Tensor& t) {
                           return at::upsample_nearest2d(t, {16, 12});
                         }};
  for (const Placement& placement : {R, S0, Shard(2)}) {
    CAPTURE(to_string(placement));
    const at::Tensor d = last(spread(x, line(), {placement}));
    for (const Op op : kOps) {
      const at::Tensor got = op(d), want = op(last(x));
      CHECK(got.strides() == want.strides());
      CHECK(close(full_tensor(got.permute({0, 2, 3, 1}).flatten(1)), want.permute({0, 2, 3, 1}).flatten(1)));
    }
  }
}

TESSERA_RANKS_TEST_CASE("operands of which different mesh dimensions cut the same dimension by sizes", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const Placement sizes = RaggedShard(0, {1, 3});
  using Op = at::Tensor (*)(const at::Tensor&, const at::Tensor&);
  constexpr Op kOps[] = {
      [](const at::Tensor& x, const at::Tensor& y) { return x + y; },
      [](const at::Tensor& x, const at::Tensor& y) { return at::lerp(x, y, y); },
      [](const at::Tensor& x, const at::Tensor& y) { return at::mm(x.t(), y); },
      [](const at::Tensor& x, const at::Tensor& y) {
        return at::cat({x, y}, 1);
      },
      [](const at::Tensor& x, const at::Tensor& y) { return at::where(x > 0, x, y); },
      [](const at::Tensor& x, const at::Tensor& y) { return x.sum(1) * y.sum(1); },
      [](const at::Tensor& x, const at::Tensor& y) { return at::bmm(x.unsqueeze(1), y.unsqueeze(2)); }};
  const auto run = [](Op op, const at::Tensor& x, const at::Tensor& y) {
    const at::Tensor out = op(x, y);
    out.square().sum().backward();
    return out.detach();
  };
  for (const Op op : kOps) {
    const at::Tensor a = leaf(sample({4, 3})), b = leaf(sample({4, 3}, 1));
    const at::Tensor x = leaf(sample({4, 3}), mesh, {sizes, R}), y = leaf(sample({4, 3}, 1), mesh, {R, sizes});
    const at::Tensor want = run(op, a, b);
    CHECK(close(full_tensor(run(op, x, y)), want));
    CHECK(close(full_tensor(x.grad()), a.grad()));
    CHECK(close(full_tensor(y.grad()), b.grad()));
  }
}

TESSERA_RANKS_TEST_CASE("results that LibTorch gives in row-major order can be viewed by it", {1, 2, 3}) {
  const at::Tensor x = sample({4, 5, 6}).transpose(0, 2);
  using Op = at::Tensor (*)(const at::Tensor&);
  constexpr Op kOps[] = {
      [](const at::Tensor& t) { return at::layer_norm(t, {4}); },
      [](const at::Tensor& t) { return at::logcumsumexp(t, 1); },
      [](const at::Tensor& t) { return std::get<0>(at::cummax(t, 1)); },
      [](const at::Tensor& t) { return at::roll(t, 1, 2); },
      // There is one id for each row of the table, so that the result has the table's sizes.
      [](const at::Tensor& t) {
        const at::Tensor table = t.flatten(0, 1), ids = at::arange(30, on(at::kLong)).flip(0);
        const at::Tensor turned = table.t().contiguous().t();
        return at::embedding(turned, is_dtensor(t) ? spread(ids, mesh_of(t), {R}) : ids).unflatten(0, {6, 5});
      }};
  for (const Placement& placement : {R, Shard(2), Shard(1)}) {  // the last two are S(0) and S(1) of x
    CAPTURE(to_string(placement));
    const at::Tensor d = spread(sample({4, 5, 6}), line(), {placement}).transpose(0, 2);
    REQUIRE(d.strides() == x.strides());
    for (const Op op : kOps) {
      const at::Tensor want = op(x), got = op(d);
      CHECK(got.strides() == want.strides());
      CHECK(close(full_tensor(got.view({30, 4})), want.view({30, 4})));
    }
  }
}

// LibTorch's kernels call as_strided where an image is pooled to one pixel: on the tensor itself, with channels-last
// strides.
TESSERA_RANKS_TEST_CASE("a channels-last image that is pooled to one pixel stays channels-last, and has gradients",
                        {1, 2, 3, 4}) {
  const at::Tensor flat = sample({3, 4, 6, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor deep = sample({3, 4, 2, 5, 2}).contiguous(at::MemoryFormat::ChannelsLast3d);
  const at::Tensor kernel = sample({5, 4, 1, 1}, 1);
  const auto pooled = [](const at::Tensor& t) {
    return t.dim() == 4 ? at::adaptive_avg_pool2d(t, {1, 1}) : at::adaptive_avg_pool3d(t, {1, 1, 1});
  };
  // A convolution follows, which needs the order in memory.
  const auto loss = [&](const at::Tensor& y, const at::Tensor& weights) {
    const at::Tensor sum = (y.flatten(1) * y.flatten(1)).sum();
    return y.dim() == 4 ? sum + at::conv2d(y, weights).relu().flatten(1).sum() : sum;
  };
  for (const at::Tensor& image : {flat, deep}) {
    const at::Tensor plain = image.detach().clone().requires_grad_();
    const at::Tensor want = pooled(plain);
    loss(want, kernel).backward();
    for (const Placement& placement : {R, S0, Shard(1), Shard(2), Shard(3), Partial()}) {
      CAPTURE(to_string(placement));
      const at::Tensor x =
          spread(image, line(), {placement}).contiguous(image.suggest_memory_format()).detach().requires_grad_();
      const at::Tensor got = pooled(x);
      CHECK(got.strides() == want.strides());
      CHECK(got.suggest_memory_format() == want.suggest_memory_format());
      CHECK(close(full_tensor(got.detach()), want.detach()));
      loss(got, spread(kernel, line(), {R})).backward();
      CHECK(close(full_tensor(x.grad()), plain.grad()));
      const at::InferenceMode inference;
      CHECK(close(full_tensor(pooled(x)), want));
    }
  }
}

TESSERA_RANKS_TEST_CASE("stft and istft of cut signals are beside one process, and move nothing where the batch is cut",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor signals = sample({5, 18}), window = sample({6}, 1).abs() + 0.5;
  const auto spectrum = [](const at::Tensor& x, const at::Tensor& w) {
    return at::stft(x, 6, 2, 6, w, false, true, true);
  };
  const auto backward = [](const at::Tensor& s) { (at::view_as_real(s) * sample({5, 4, 7, 2}, 2)).sum().backward(); };
  const at::Tensor plain = leaf(signals), want = spectrum(plain, window);
  backward(want);
  const ImplicitReplication guard;
  for (const Placement& placement : {R, S0, Shard(1)}) {
    CAPTURE(to_string(placement));
    const at::Tensor d = leaf(spread(signals, mesh, {placement}));
    CommCounter counter(mesh);
    const at::Tensor got = spectrum(d, window);
    if (!placement.is_shard(1)) {
      CHECK(counter.total() == 0);
      CHECK(placements_of(got) == Placements{placement});
    }
    CHECK(close(full_tensor(got.detach()), want.detach()));
    backward(got);
    CHECK(close(full_tensor(d.grad()), plain.grad()));
    const at::Tensor w = at::ones({6}, on(at::kDouble));
    const at::Tensor whole = at::stft(signals, 6, 2, 6, w, true, "reflect", false, true, true);
    const at::Tensor cut = at::stft(d.detach(), 6, 2, 6, w, true, "reflect", false, true, true);
    CHECK(close(full_tensor(cut), whole));
    CHECK(close(full_tensor(at::istft(cut, 6, 2, 6, w)), signals));
  }
}

TESSERA_RANKS_TEST_CASE("as_strided takes frames of the last dimension, and nothing else that is not the tensor itself",
                        {2}) {
  const at::Tensor x = sample({4, 9}), d = spread(x, line(), {S0});
  CHECK(same(full_tensor(d.as_strided({4, 3, 4}, {9, 2, 1})), x.as_strided({4, 3, 4}, {9, 2, 1})));
  CHECK(same(full_tensor(d.as_strided({4, 2, 4}, {9, 2, 1})), x.as_strided({4, 2, 4}, {9, 2, 1})));
  CHECK(placements_of(d.as_strided({4, 3, 4}, {9, 2, 1})) == Placements{S0});
  // These frames reach into the next row, begin elsewhere, and leave out rows.
  CHECK_THROWS_WITH_AS(d.as_strided({4, 4, 4}, {9, 2, 1}),
                       doctest::Contains("aten::as_strided: [4, 4, 4] by strides [9, 2, 1] from 0 of "),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(d.as_strided({4, 3, 4}, {9, 2, 1}, 1),
                       doctest::Contains("aten::as_strided: [4, 3, 4] by strides [9, 2, 1] from 1 of "),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(d.as_strided({2, 3, 4}, {18, 2, 1}),
                       doctest::Contains("aten::as_strided: [2, 3, 4] by strides [18, 2, 1] from 0 of "),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("a view tells the storage_offset() that it has in one process", {1, 2, 3, 4}) {
  using View = at::Tensor (*)(const at::Tensor&);
  constexpr View kViews[] = {
      [](const at::Tensor& t) { return t.slice(0, 1); },
      [](const at::Tensor& t) { return t.slice(1, 2, 5, 2); },
      [](const at::Tensor& t) { return t.select(1, 3); },
      [](const at::Tensor& t) { return t.slice(0, 2).slice(1, 1).t(); },
      [](const at::Tensor& t) { return t.slice(1, 1).detach(); },
      [](const at::Tensor& t) {
        return t.slice(0, 1).unsqueeze(0).expand({2, -1, -1});
      },
      [](const at::Tensor& t) { return t.split(2)[1]; },
      [](const at::Tensor& t) { return t.slice(0, 1).unbind()[1]; },
      [](const at::Tensor& t) { return t.diagonal(1); },
      [](const at::Tensor& t) { return t.slice(0, 1).unfold(1, 2, 3); },
      [](const at::Tensor& t) { return t.slice(0, 1).view(at::kComplexDouble); },
      [](const at::Tensor& t) { return at::view_as_real(t.view(at::kComplexDouble).slice(1, 1)).select(-1, 1); },
      [](const at::Tensor& t) { return t.slice(0, 1).clone(); },
      [](const at::Tensor& t) { return t.slice(0, 1) + 1; },
  };
  const auto reals = [](const at::Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; };
  const at::Tensor x = sample({5, 6});
  for (const Placement& placement : {R, S0, Shard(1), Partial()}) {
    CAPTURE(to_string(placement));
    const at::Tensor d = spread(x, line(), {placement});
    const ImplicitReplication guard;
    for (std::size_t i = 0; i < std::size(kViews); ++i) {
      CAPTURE(i);
      const View view = kViews[i];
      const int64_t want = view(x).storage_offset();
      CHECK(view(d).storage_offset() == want);
      CHECK(view(d).storage_offset() == want);  // decided before
      CHECK(close(reals(full_tensor(view(d))), reals(view(x))));
      const at::InferenceMode inference;
      CHECK(view(d).storage_offset() == want);
    }
    const at::Tensor rows = d.slice(0, 1);
    CHECK(rows.as_strided(rows.sizes(), rows.strides()).storage_offset() == 6);
    CHECK(rows.as_strided(rows.sizes(), rows.strides(), 6).storage_offset() == 6);
    CHECK_THROWS_WITH_AS(rows.as_strided(rows.sizes(), rows.strides(), 0),
                         doctest::Contains("from 6: a DTensor's pieces lie in other memory than one process's"),
                         std::invalid_argument);
    CHECK(d.add(1).storage_offset() == 0);  // of a TensorImpl that held a view
  }
}

TESSERA_RANKS_TEST_CASE("a view as a wider dtype exists, or is refused on every rank, as in one process",
                        {1, 2, 3, 4}) {
  const at::Tensor x = sample({5, 6});
  CHECK_THROWS_WITH(x.slice(1, 1, 5).view(at::kComplexDouble),
                    doctest::Contains("must be divisible by 2 to view Double as ComplexDouble"));
  const char* const why = "the viewed DTensor begins 8 bytes into its memory";
  for (const Placement& placement : {R, S0, Shard(1)}) {
    CAPTURE(to_string(placement));
    const at::Tensor d = spread(x, line(), {placement});
    const ImplicitReplication guard;
    const auto check = [&](const auto& view) {
      for (int i = 0; i < 2; ++i) CHECK(same(full_tensor(at::view_as_real(view(d))), at::view_as_real(view(x))));
    };
    check([](const at::Tensor& t) { return t.slice(1, 2).view(at::kComplexDouble); });
    check([](const at::Tensor& t) { return at::view_as_complex(t.slice(1, 2).slice(1, 0, 2)); });
    // Decided anew, and before.
    for (int i = 0; i < 2; ++i) CHECK_THROWS_WITH(d.slice(1, 1, 5).view(at::kComplexDouble), doctest::Contains(why));
    const at::InferenceMode inference;
    CHECK_THROWS_WITH(d.slice(1, 1, 5).view(at::kComplexDouble), doctest::Contains(why));
  }
}

TESSERA_RANKS_TEST_CASE("the least number written over pending averages stays finite", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor rows = sample({mesh.size(), 6}, 0, at::kFloat), mask = at::arange(6, on(at::kLong)) % 2 == 0;
  const at::Tensor x = terms(rows, mesh, ReduceOp::kAvg);
  for (const double least : {static_cast<double>(std::numeric_limits<float>::lowest()), -1e4}) {
    const at::Tensor want = rows.mean(0);
    CHECK(close(full_tensor(x.masked_fill(spread(mask, mesh, {R}), least)), want.masked_fill(mask, least), 1e-6));
    CHECK(close(full_tensor(at::fill(x, least)), at::full({6}, least, on(at::kFloat)), 1e-6));
  }
}

TESSERA_RANKS_TEST_CASE("complex numbers beside real and complex tensors", {1, 2}) {
  const DeviceMesh mesh = line();
  const c10::complex<double> number(1, 2);
  const at::Tensor rows = sample({mesh.size(), 4});
  CHECK(close(full_tensor(terms(rows, mesh, ReduceOp::kMax) + number), rows.amax(0) + number));
  const at::Tensor x = at::complex(sample({4, 3}), sample({4, 3}, 1));
  for (const Placement& placement : {S0, Shard(1), R}) {
    const at::Tensor padded = at::constant_pad_nd(spread(x, mesh, {placement}), {1, 1}, number);
    CHECK(close(full_tensor(padded), at::constant_pad_nd(x, {1, 1}, number)));
  }
}

TESSERA_RANKS_TEST_CASE("from_local with check: an error in what one rank passes is thrown on all, and the job goes on",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const bool last = mesh.local_rank(0) == mesh.size() - 1;
  const auto thrown = [&](const at::Tensor& local, const Placement& placement, FromLocalOptions options) {
    options.check = true;
    try {
      from_local(local, mesh, {placement}, options);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const at::Tensor good = sample({3, 2});
  CHECK(thrown(last ? sample({3}) : good, Shard(1), {}).find("from_local") != std::string::npos);
  CHECK(thrown(last ? at::Tensor() : good, S0, {}).find("undefined") != std::string::npos);
  const std::vector<int64_t> shape = {3 * mesh.size() - (last ? 1 : 0), 2};
  CHECK(thrown(good, S0, {.shape = shape}).find("from_local: the ranks were called with different") !=
        std::string::npos);
  CHECK(close(full_tensor(from_local(good, mesh, {S0}, {.check = true}).sum()), good.sum() * mesh.size()));
}

TESSERA_RANKS_TEST_CASE("from_local with check: of any number of dimensions, which may differ from rank to rank",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const int64_t dims : {0, 16, 17, 20, 64}) {
    CAPTURE(dims);
    std::vector<int64_t> sizes(static_cast<std::size_t>(dims), 1);
    if (dims > 0) sizes.back() = 3;
    const at::Tensor piece = sample(sizes);
    const at::Tensor alike = from_local(piece, mesh, {R}, {.check = true});
    CHECK(alike.sizes() == piece.sizes());
    CHECK(same(to_local(alike), piece));
    if (dims == 0) continue;
    const at::Tensor cut = from_local(piece, mesh, {Shard(dims - 1)}, {.check = true});
    CHECK(cut.size(-1) == 3 * mesh.size());
    if (mesh.size() == 1) continue;
    const at::Tensor odd = mesh.local_rank(0) == 0 ? piece : piece.flatten();
    CHECK_THROWS_WITH_AS(from_local(odd, mesh, {R}, {.shape = sizes, .check = true}),
                         doctest::Contains("; rank 1 has a piece [3], not [1, 1, 1"), std::invalid_argument);
  }
}

TESSERA_RANKS_TEST_CASE("operators on whole tensors refuse plain tensors as others do", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor plain = sample({3, 2}), x = spread(sample({5, 2}), mesh, {S0});
  CHECK_THROWS_WITH_AS(at::pad_sequence({x, plain}), doctest::Contains("a plain tensor [3, 2] among DTensors"),
                       std::invalid_argument);
  const ImplicitReplication replicated;
  CHECK(close(full_tensor(at::pad_sequence({x, plain})), at::pad_sequence({sample({5, 2}), plain})));
}

TESSERA_RANKS_TEST_CASE("a result of another size leaves the tensor that it would be written to unchanged", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(at::tensor({0.0, 1.0, 2.0}, on(at::kDouble)), mesh, {S0});
  at::Tensor out = spread(whole_numbers({5, 1}, at::kLong), mesh, {R});
  CHECK_THROWS_WITH_AS(at::nonzero_out(out, x), doctest::Contains("give a tensor of its sizes"), std::invalid_argument);
  CHECK(same(full_tensor(out), whole_numbers({5, 1}, at::kLong)));
  at::Tensor fits = spread(whole_numbers({2, 1}, at::kLong), mesh, {R});
  at::nonzero_out(fits, x);
  CHECK(same(full_tensor(fits), at::tensor({1, 2}, on(at::kLong)).view({2, 1})));
}

TESSERA_RANKS_TEST_CASE("in-place views that would need communication are refused before any", {2}) {
  const at::Tensor x = spread(sample({2, 1, 3}), line(), {Shard(1)});
  const Strict strict;
  CHECK_THROWS_WITH_AS(x.squeeze_(1), doctest::Contains("pieces would have to move"), std::invalid_argument);
  CHECK(x.sizes() == at::IntArrayRef({2, 1, 3}));
}

TESSERA_RANKS_TEST_CASE("batch norm writes both running statistics or neither", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 4, 3}), zeros = at::zeros({4}, on(at::kDouble)),
                   ones = at::ones({4}, on(at::kDouble));
  for (const bool plain : {true, false}) {
    const auto statistic = [&](const at::Tensor& t) { return plain ? t.clone() : spread(t, mesh, {R}); };
    const at::Tensor mean = statistic(zeros), variance = statistic(ones), d = spread(x, mesh, {Shard(1)});
    const ImplicitReplication replicated;
    {
      const Strict strict;
      CHECK_THROWS_WITH(at::batch_norm(d, {}, {}, mean, variance, true, 0.5, 1e-5, false), doctest::Contains("Strict"));
    }
    const auto value = [&](const at::Tensor& t) { return plain ? t : full_tensor(t); };
    CHECK(same(value(mean), zeros));
    CHECK(same(value(variance), ones));
    at::batch_norm(d, {}, {}, mean, variance, true, 0.5, 1e-5, false);
    const at::Tensor want_mean = zeros.clone(), want_variance = ones.clone();
    at::batch_norm(x, {}, {}, want_mean, want_variance, true, 0.5, 1e-5, false);
    CHECK(close(value(mean), want_mean));
    CHECK(close(value(variance), want_variance));
  }
}

TESSERA_RANKS_TEST_CASE("one rank alone may ask how an operator would run, under Checked too", {2}) {
  const DeviceMesh mesh = line();
  const Checked checked(mesh);
  const ImplicitReplication replicated;
  const at::Tensor x = spread(sample({4, 2}), mesh, {S0});
  if (mesh.local_rank(0) == 0) CHECK(explain_op("aten::add.Tensor", {x, sample({4, 2})}).by_rule);
  CHECK(full_tensor(x.sum()).dim() == 0);
}

// LibTorch's kernel for CPUs computes other gradients where they lie in memory in another order than the image.
TESSERA_RANKS_TEST_CASE("batch norms of any memory order, whose gradients have another one", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor weight = sample({2}, 1), bias = sample({2}, 2), mean = sample({2}, 3), variance = mean.square() + 1;
  const auto over_channels = [](const at::Tensor& t) { return t.view({1, 2, 1, 1}); };
  const auto by_hand = [&](const at::Tensor& x, bool trains) {
    const at::IntArrayRef dims = {0, 2, 3};
    const at::Tensor m = trains ? x.mean(dims, /*keepdim=*/true) : over_channels(mean);
    const at::Tensor v = trains ? x.var(dims, /*unbiased=*/false, /*keepdim=*/true) : over_channels(variance);
    return (x - m) / (v + 1e-5).sqrt() * over_channels(weight) + over_channels(bias);
  };
  const auto last_pixels = [](const at::Tensor& y) { return y.flatten(2).transpose(1, 2).slice(1, 4); };
  for (const int64_t n : {1, 2}) {
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      for (const bool trains : {true, false}) {
        const at::Tensor image = sample({n, 2, 3, 2}).contiguous(format), want = leaf(image);
        const at::Tensor result = last_pixels(by_hand(want, trains));
        const at::Tensor factors = sample(result.sizes(), 4);
        (result * factors).sum().backward();
        for (const Placement& p : {R, S0, Shard(1), Shard(2)}) {
          CAPTURE(to_string(p));
          const auto whole = [&](const at::Tensor& t) { return spread(t, mesh, {R}); };
          const at::Tensor x = leaf(image, mesh, {p});
          const at::Tensor y =
              at::batch_norm(x, whole(weight), whole(bias), trains ? at::Tensor() : whole(mean),
                             trains ? at::Tensor() : whole(variance), trains, 0.1, 1e-5, /*cudnn_enabled=*/true);
          (last_pixels(y) * whole(factors)).sum().backward();
          CHECK(close(full_tensor(x.grad()), want.grad(), 1e-11));
        }
      }
    }
  }
}

// LibTorch pads a piece of one item in channels-last where its sizes and strides say so, whatever those of the whole
// say.
TESSERA_RANKS_TEST_CASE("a padded image of single pixels is row-major on every rank, and can be flattened", {1, 2, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor pixels = sample({4, 1, 2}).transpose(0, 1).contiguous().transpose(0, 1);  // steps are 2, 8 and 1
  const auto padded = [](const at::Tensor& t) {
    return at::constant_pad_nd(t.transpose(1, 2).unsqueeze(2), {1, 0, 2, 1}).flatten(1);
  };
  CHECK(same(full_tensor(padded(spread(pixels, mesh, {S0}))), padded(pixels)));
  const at::Tensor stays =
      from_local(piece_of(pixels, mesh, {S0}), mesh, {S0}, {.shape = {{4, 1, 2}}, .stride = {{2, 8, 1}}});
  CHECK(same(full_tensor(padded(stays)), padded(pixels)));
  // A pad that adds nothing keeps any order.
  const at::Tensor columns = sample({4, 3, 5}).transpose(1, 2);
  const auto shortened = [](const at::Tensor& t) {
    return at::constant_pad_nd(t, {0, -1}).transpose(1, 2).view({4, -1});
  };
  const at::Tensor cut = spread(columns.transpose(1, 2), mesh, {S0}).transpose(1, 2);
  CHECK(same(full_tensor(shortened(cut)), shortened(columns)));
}

TESSERA_RANKS_TEST_CASE("gradients that are scaled back into other tensors stay as they were", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3}).to(at::kFloat);
  const at::Tensor gradient = spread(whole, mesh, {S0});
  const at::Tensor out = spread(at::zeros({5, 3}, on(at::kFloat)), mesh, {S0});
  at::Tensor found = spread(at::zeros({1}, on(at::kFloat)), mesh, {R});
  const at::Tensor half = spread(at::full({1}, 0.5, on(at::kFloat)), mesh, {R});
  std::vector<at::Tensor> outs = {out};
  at::_amp_foreach_non_finite_check_and_unscale_out(outs, {gradient}, found, half);
  CHECK(at::allclose(full_tensor(out), whole * 0.5));
  CHECK(at::equal(full_tensor(gradient), whole));
}

TESSERA_RANKS_TEST_CASE("a number that is not finite on one rank is found on all of them", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3}).to(at::kFloat);
  for (const bool finite : {true, false}) {
    if (!finite) whole[4][2] = std::numeric_limits<float>::infinity();
    std::vector<at::Tensor> gradients = {spread(sample({4}).to(at::kFloat), mesh, {R}), spread(whole, mesh, {S0})};
    at::Tensor found = spread(at::zeros({1}, on(at::kFloat)), mesh, {R});
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found,
                                                   spread(at::full({1}, 0.5, on(at::kFloat)), mesh, {R}));
    CHECK(to_local(found).item<float>() == (finite ? 0 : 1));
    CHECK(at::equal(full_tensor(gradients[1]), whole * 0.5));
  }
}

TESSERA_RANKS_TEST_CASE("gradients of any layout are scaled back beside a plain flag and a plain scale", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3}).to(at::kFloat);
  for (const Placement& placement : {Placement(S0), Placement(R)}) {
    std::vector<at::Tensor> gradients = {spread(whole, mesh, {placement})};
    at::Tensor found = at::zeros({1}, on(at::kFloat));
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, at::full({1}, 0.5, on(at::kFloat)));
    CHECK(found.item<float>() == 0);
    CHECK(at::equal(full_tensor(gradients[0]), whole * 0.5));
  }
}

TESSERA_RANKS_TEST_CASE("a number that LibTorch refuses is refused after one that it takes, and fails no job", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({1, 3}), mesh, {S0});  // the last rank's piece is empty
  CHECK(at::equal(full_tensor(at::softshrink(x, 0.5)), at::softshrink(sample({1, 3}), 0.5)));
  CHECK_THROWS(at::softshrink(x, -0.5));
  CHECK(at::equal(full_tensor(at::celu(x, 2)), at::celu(sample({1, 3}), 2)));
  CHECK_THROWS(at::celu(x, 0));
  CHECK(at::equal(full_tensor(at::renorm(x, 2, 0, 1)), at::renorm(sample({1, 3}), 2, 0, 1)));
  CHECK_THROWS(at::renorm(x, -2, 0, 1));
  CHECK(at::equal(full_tensor(x), sample({1, 3})));
}

TESSERA_RANKS_TEST_CASE("grouped products take pieces whose rows begin at any address", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor a = sample({6, 8}).to(at::kFloat), b = sample({3, 8, 4}).to(at::kFloat);
  const at::Tensor ends = at::tensor({2, 3, 6}, on(at::kInt));
  const at::Tensor expected = at::_grouped_mm(a, b, ends);
  for (const auto& [left, right] : {std::pair{R, Shard(2)}, {Shard(1), Shard(1)}, {R, R}}) {
    const at::Tensor got = at::_grouped_mm(spread(a, mesh, {left}), spread(b, mesh, {right}), spread(ends, mesh, {R}));
    CHECK(at::allclose(full_tensor(got), expected, 1e-4, 1e-4));
    if (!(left == R && right == R)) CHECK(!placements_of(got)[0].is_replicate());
  }
}
