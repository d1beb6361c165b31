// Tests that a view and the viewed tensor share memory: what is written to one is read from the other. A view that
// needed communication is a copy, and reading it throws where its values would be old, on every rank alike, in every
// mode, whoever writes.

#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/explain_op.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/placement/partition.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;
using at::indexing::Slice;

namespace {

struct View {
  std::string name;
  at::Tensor (*of)(const at::Tensor& x);  // x is 4 x 6
};

const std::vector<View>& views() {
  static const std::vector<View> all = {
      {"view({3, 8})",
       [](const at::Tensor& x) {
         return x.view({3, 8});
       }},
      {"view({4, 3, 2})",
       [](const at::Tensor& x) {
         return x.view({4, 3, 2});
       }},
      {"view({24})", [](const at::Tensor& x) { return x.view({24}); }},
      {"view({2, 2, 6})",
       [](const at::Tensor& x) {
         return x.view({2, 2, 6});
       }},
      {"diagonal", [](const at::Tensor& x) { return x.diagonal(); }},
      {"diagonal above", [](const at::Tensor& x) { return x.diagonal(2, 1, 0); }},
      {"unfold rows", [](const at::Tensor& x) { return x.unfold(0, 2, 1); }},
      {"unfold columns", [](const at::Tensor& x) { return x.unfold(1, 3, 2); }},
      {"a view of a copy",
       [](const at::Tensor& x) {
         return x.view({3, 8}).slice(1, 1, 7).t();
       }},
      {"a copy of a view", [](const at::Tensor& x) { return x.slice(1, 0, 4).diagonal(); }},
      {"a copy of a view of a view", [](const at::Tensor& x) { return x.t().slice(0, 1, 5).t().unfold(0, 3, 1); }},
      {"a copy of a copy",
       [](const at::Tensor& x) {
         return x.view({8, 3}).diagonal();
       }},
      {"a copy, detached",
       [](const at::Tensor& x) {
         return x.view({3, 8}).detach();
       }},
      {"a copy of what was detached",
       [](const at::Tensor& x) {
         return x.detach().view({3, 8});
       }},
      {"expand",
       [](const at::Tensor& x) {
         return x.unsqueeze(0).expand({2, 4, 6});
       }},
      {"split", [](const at::Tensor& x) { return x.split(3, 0)[0]; }},
      {"split columns", [](const at::Tensor& x) { return x.split(4, 1)[1]; }},
      {"chunk", [](const at::Tensor& x) { return x.chunk(3, 1)[1]; }},
      {"tensor_split", [](const at::Tensor& x) { return x.tensor_split(3, 0)[2]; }},
      {"unbind", [](const at::Tensor& x) { return x.unbind(0)[2]; }},
      {"unbind columns", [](const at::Tensor& x) { return x.unbind(1)[4]; }},
      {"narrow", [](const at::Tensor& x) { return x.narrow(0, 1, 2); }},
      {"narrow columns", [](const at::Tensor& x) { return x.narrow(1, 1, 4); }},
      {"select", [](const at::Tensor& x) { return x.select(1, 3); }},
      {"every second row", [](const at::Tensor& x) { return x.slice(0, 0, 4, 2); }},
      {"indexed by slices",
       [](const at::Tensor& x) {
         return x.index({Slice(1, 3), Slice(0, 6, 3)});
       }},
      {"movedim", [](const at::Tensor& x) { return x.movedim(0, 1); }},
      {"permute",
       [](const at::Tensor& x) {
         return x.view({2, 2, 6}).permute({2, 0, 1});
       }},
      {"reshape",
       [](const at::Tensor& x) {
         return x.reshape({3, 8});
       }},
      {"reshape({2, 12})",
       [](const at::Tensor& x) {
         return x.reshape({2, 12});
       }},
      {"flatten", [](const at::Tensor& x) { return x.flatten(); }},
      {"ravel", [](const at::Tensor& x) { return x.ravel(); }},
      {"unflatten",
       [](const at::Tensor& x) {
         return x.unflatten(1, {2, 3});
       }},
      {"view_as",
       [](const at::Tensor& x) {
         return x.view_as(at::empty({12, 2}, at::kMeta));
       }},
      {"view(dtype)", [](const at::Tensor& x) { return x.view(at::kLong); }},
      {"view of a smaller dtype", [](const at::Tensor& x) { return x.view(at::kInt); }},
      {"as complex",
       [](const at::Tensor& x) {
         return at::view_as_complex(x.view({4, 3, 2}));
       }},
      {"the real parts",
       [](const at::Tensor& x) {
         return at::real(at::view_as_complex(x.view({4, 3, 2})));
       }},
      {"the imaginary parts",
       [](const at::Tensor& x) {
         return at::imag(at::view_as_complex(x.view({4, 3, 2})));
       }},
      {"the imaginary parts of the conjugate",
       [](const at::Tensor& x) {
         return at::imag(at::view_as_complex(x.view({4, 3, 2})).conj());
       }},
      {"squeezed", [](const at::Tensor& x) { return x.unsqueeze(1).squeeze(1).alias(); }},
  };
  return all;
}

struct Write {
  std::string name;
  void (*to)(at::Tensor& x);
};

const std::vector<Write>& writes() {
  static const std::vector<Write> all = {
      {"add_", [](at::Tensor& x) { x.add_(1); }},
      {"add_ boxed", [](at::Tensor& x) { x.addcmul_(x, x, 2).remainder_(3); }},
      {"out=", [](at::Tensor& x) { at::add_out(x, x, x); }},
      {"out= that decomposes", [](at::Tensor& x) { at::square_out(x, x + 1); }},
      {"copy_", [](at::Tensor& x) { x.copy_(x * 3); }},
      {"a list", [](at::Tensor& x) { at::_foreach_add_({x}, 1); }},
      {"a list with what lies elsewhere", [](at::Tensor& x) { at::_foreach_addcmul_({x}, {x * 2}, {x}, 2); }},
      {"a decomposition", [](at::Tensor& x) { at::eye_out(x, 4, 6); }},
      {"by detach", [](at::Tensor& x) { x.detach().mul_(2); }},
      {"by data", [](at::Tensor& x) { x.data().zero_(); }},
      {"by a row", [](at::Tensor& x) { x.select(0, 1).fill_(7); }},
      {"by a view of a view", [](at::Tensor& x) { x.t().slice(0, 1, 5).unsqueeze(0).neg_(); }},
      {"by columns of a split", [](at::Tensor& x) { x.detach().split(2, 1)[1].fill_(5); }},
      {"by set_data's source",
       [](at::Tensor& x) {
         const c10::InferenceMode as_it_was_made(x.is_inference());
         at::Tensor other = at::empty_like(x);
         other.set_data(x);
         other.sub_(4);
       }},
  };
  return all;
}

enum Outcome : int64_t { kFollows, kRefused, kStale };

// Reads without communication first; if that throws, it must throw on every rank.
Outcome read(const at::Tensor& view, const at::Tensor& want, const DeviceMesh& mesh) {
  int64_t refused = 0;
  try {
    to_local(view);
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).find("has been written since") != std::string::npos);
    refused = 1;
  }
  const at::Tensor all = all_gather(at::tensor(refused, on(at::kLong)), mesh, 0);
  CHECK_MESSAGE((all == refused).all().item<bool>(), "refused on some ranks alone");
  if (all.any().item<bool>()) return kRefused;
  return same(full_tensor(view), want) ? kFollows : kStale;
}

// Says whether the tensor is made, viewed and written under InferenceMode.
struct Mode {
  std::string name;
  bool made, viewed, written;
};

const std::vector<Mode>& modes() {
  static const std::vector<Mode> all = {{"normal", false, false, false},
                                        {"in inference", true, true, true},
                                        {"written in inference", false, false, true},
                                        {"viewed in inference", false, true, false},
                                        {"viewed and written in inference", false, true, true},
                                        {"an inference tensor viewed outside", true, false, true}};
  return all;
}

template <class Body>
auto in_mode(bool inference, const Body& body) {
  const c10::InferenceMode mode(inference);
  const at::NoGradGuard no_grad;
  return body();
}

// Counts what became of views that were read, or written, after a write.
struct Counts {
  int64_t follows = 0, refused = 0;

  void add(Outcome outcome) {
    follows += outcome == kFollows ? 1 : 0;
    refused += outcome == kRefused ? 1 : 0;
  }
};

// Checks the view before and after the write. Returns what became of it.
Outcome check(const View& view, const Write& write, const Mode& mode, const DeviceMesh& mesh, const Placement& cut) {
  CAPTURE(view.name);
  CAPTURE(write.name);
  CAPTURE(mode.name);
  CAPTURE(to_string(cut));
  at::Tensor plain = sample({4, 6});
  at::Tensor x = in_mode(mode.made, [&] { return spread(plain.clone(), mesh, {cut}); });
  const at::Tensor want = view.of(plain);
  const at::Tensor y = in_mode(mode.viewed, [&] { return view.of(x); });
  CHECK(in_mode(mode.viewed, [&] { return read(y, want, mesh); }) == kFollows);
  in_mode(false, [&] { write.to(plain); });
  in_mode(mode.written, [&] { write.to(x); });
  const Outcome outcome = in_mode(mode.written, [&] { return read(y, want, mesh); });
  CHECK(outcome != kStale);
  CHECK(same(in_mode(mode.written, [&] { return full_tensor(x); }), plain));
  CHECK(read(in_mode(mode.viewed, [&] { return view.of(x); }), want, mesh) == kFollows);
  return outcome;
}

// Some views need no communication, and some do where ranks hold parts.
void check_counts(const Counts& counts, const DeviceMesh& mesh, bool has_parts) {
  CAPTURE(counts.follows);
  CAPTURE(counts.refused);
  CHECK(counts.follows > 0);
  if (has_parts && mesh.size() > 1) CHECK(counts.refused > 0);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("no view is stale after the viewed tensor was written, in any mode", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const Placement& cut : {S0, S1, R}) {
    Counts counts;
    for (const View& view : views()) {
      for (const Mode& mode : modes()) counts.add(check(view, writes()[0], mode, mesh, cut));
    }
    CAPTURE(to_string(cut));
    check_counts(counts, mesh, cut.is_shard());
  }
}

TESSERA_RANKS_TEST_CASE("no view is stale, by whatever operator the viewed tensor was written", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const Write& write : writes()) {
    Counts counts;
    for (const Placement& cut : {S0, S1}) {
      for (const std::size_t view : {0, 2, 4, 6}) {
        for (const std::size_t mode : {0, 1, 2}) counts.add(check(views()[view], write, modes()[mode], mesh, cut));
      }
    }
    CAPTURE(write.name);
    check_counts(counts, mesh, /*has_parts=*/true);
  }
}

TESSERA_RANKS_TEST_CASE("a write to a view reaches the viewed tensor, its other views, and no old copy", {1, 2, 3, 4}) {
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& layout : all_layouts(mesh.ndim(), {R, S0, S1, BlockCyclic(1, 1)})) {
      for (const View& view : views()) {
        for (const bool inference : {false, true}) {
          CAPTURE(view.name);
          CAPTURE(to_string(layout));
          CAPTURE(inference);
          const at::Tensor plain = sample({4, 6});
          const c10::InferenceMode mode(inference);
          const at::NoGradGuard no_grad;
          const at::Tensor x = spread(plain.clone(), mesh, layout);
          const at::Tensor row = x.select(0, 1), y = view.of(x), z = view.of(x);
          if (view.name == "expand" || y.scalar_type() != at::kDouble) continue;  // several elements share one address
          // Pieces that are viewed as complex numbers, or conjugated, may be copied where they lie.
          const auto is = [&](const char* text) { return view.name.find(text) != std::string::npos; };
          if (is("complex") || is("parts")) continue;
          for (const double value : {5.0, 7.0}) {
            y.copy_(at::full_like(y, value));
            y.fill_(value + 1);  // windows overlap, so that a sum would be added twice
            view.of(plain).fill_(value + 1);
            CHECK(same(full_tensor(x), plain));
            CHECK(same(full_tensor(y), view.of(plain)));
            CHECK(same(full_tensor(row), plain.select(0, 1)));
            CHECK(same(full_tensor(view.of(x)), view.of(plain)));
            CHECK(read(z, view.of(plain), mesh) != kStale);
          }
          x.neg_();
          plain.neg_();
          CHECK(read(y, view.of(plain), mesh) != kStale);
        }
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("a write to a piece is seen by views of the tensor, where LibTorch counts it", {2, 3}) {
  const DeviceMesh mesh = line();
  const auto refused = [&](const auto& make, const auto& write) {
    const at::Tensor plain = sample({3, 4});
    const at::Tensor x = make(plain);
    const at::Tensor y = x.unfold(0, 2, 1);
    to_local(y);
    write(plain, x);
    CHECK_THROWS_WITH_AS(to_local(y), doctest::Contains("has been written since"), std::runtime_error);
  };
  const auto wrap = [&](const at::Tensor& plain) { return from_local(plain, mesh, {S0}); };
  const auto wrap_in_inference = [&](const at::Tensor& plain) {
    const c10::InferenceMode mode;
    return from_local(plain, mesh, {S0});
  };
  using T = const at::Tensor&;
  refused(wrap, [](T, T x) { to_local(x).add_(1); });
  refused(wrap, [](T plain, T) { plain.add_(1); });
  refused(wrap, [](T plain, T) { plain.select(1, 0).zero_(); });
  refused(wrap, [](T, T x) { to_local(x.select(1, 0)).zero_(); });
  refused(wrap, [](T, T x) { to_local(x.detach()).zero_(); });
  refused(wrap, [&](T plain, T) { from_local(plain, mesh, {S1}).zero_(); });
  refused(wrap_in_inference, [](T plain, T) { plain.add_(1); });
  refused(wrap_in_inference, [](T plain, T) {
    const c10::InferenceMode mode;
    plain.add_(1);
  });
  refused(wrap_in_inference, [](T, T x) {
    const c10::InferenceMode mode;
    to_local(x).add_(1);
  });
  // A plain product that saved the piece for its gradient sees that the DTensor was written.
  const at::Tensor weight = sample({4, 2}).requires_grad_();
  at::Tensor x = wrap(sample({3, 4}));
  const at::Tensor loss = to_local(x).mm(weight).sum();
  x.add_(1);
  CHECK_THROWS_WITH(loss.backward(), doctest::Contains("modified by an inplace operation"));
}

TESSERA_RANKS_TEST_CASE("a shape that changes in place is no write", {2}) {
  const DeviceMesh mesh = line();
  for (const bool inference : {false, true}) {
    for (const bool recorded : {false, true}) {
      if (inference && recorded) continue;
      const at::Tensor x = spread(sample({4, 6}), mesh, {S1});
      const c10::InferenceMode mode(inference);
      const at::AutoGradMode gradients(recorded);
      const at::Tensor copy = x.view({3, 8});
      x.select(0, 1).unsqueeze_(0);
      CHECK(same(full_tensor(copy), sample({4, 6}).view({3, 8})));
      const at::Tensor other = x.view({3, 8}).t_();
      CHECK(same(full_tensor(copy), sample({4, 6}).view({3, 8})));
      CHECK(same(full_tensor(other), sample({4, 6}).view({3, 8}).t()));
      x.t_();
      CHECK(same(full_tensor(copy), sample({4, 6}).view({3, 8})));
      x.as_strided_({6, 4}, {1, 6});
      CHECK(same(full_tensor(copy), sample({4, 6}).view({3, 8})));
      to_local(x).add_(1);
      CHECK_THROWS_WITH(full_tensor(copy), doctest::Contains("has been written since"));
      CHECK_THROWS_WITH(full_tensor(other), doctest::Contains("has been written since"));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a write to the piece of data() is seen by copies of views", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({4, 6}), mesh, {S1});
  const at::Tensor of_data = x.data().view({3, 8}), of_x = x.view({3, 8});
  CHECK(same(full_tensor(of_data), full_tensor(of_x)));
  to_local(x.data()).add_(1);
  CHECK_THROWS_WITH(full_tensor(of_data), doctest::Contains("has been written since"));
  CHECK_THROWS_WITH(full_tensor(of_x), doctest::Contains("has been written since"));
  const at::Tensor again = x.data().view({3, 8});
  to_local(x).add_(1);
  CHECK_THROWS_WITH(full_tensor(again), doctest::Contains("has been written since"));
  // A shape of data() that changes in place is no write, and hides none.
  const at::Tensor copy = x.view({3, 8});
  const at::Tensor data = x.data();
  data.select(0, 1).unsqueeze_(0);
  CHECK(same(full_tensor(copy), full_tensor(x).view({3, 8})));
  data.add_(1);
  CHECK_THROWS_WITH(full_tensor(copy), doctest::Contains("has been written since"));
  x.set_data(spread(sample({4, 6}, 1), mesh, {S1}));
  const at::Tensor of_new = x.view({3, 8});
  x.select(0, 1).unsqueeze_(0);
  CHECK(same(full_tensor(of_new), sample({4, 6}, 1).view({3, 8})));
  x.add_(1);
  CHECK_THROWS_WITH(full_tensor(of_new), doctest::Contains("has been written since"));
}

TESSERA_RANKS_TEST_CASE("one element of a cut tensor is written", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({5}), mesh, {S0}), want = sample({5});
  const CommCounter counter(mesh);
  x.narrow(0, 2, 1).fill_(2);
  CHECK(counter.total() == 0);
  x[3].fill_(1);
  x[0] += x[3];
  want[2] = 2;
  want[3] = 1;
  want[0] += 1;
  CHECK(same(full_tensor(x), want));
  const at::Tensor matrix = spread(sample({4, 5}), mesh, {S1}), whole = sample({4, 5});
  matrix[1][2] = 8;
  matrix.index({at::indexing::TensorIndex(1), Slice(1, 3)}).fill_(9);
  whole[1][2] = 8;
  whole.index({at::indexing::TensorIndex(1), Slice(1, 3)}).fill_(9);
  CHECK(same(full_tensor(matrix), whole));
}

TESSERA_RANKS_TEST_CASE("a copy is written through another copy, and its relatives become old", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({4, 6}), mesh, {S1}), plain = sample({4, 6});
  const at::Tensor first = x.view({3, 8}), part = first.narrow(1, 2, 4), other = x.view({3, 8});
  part.mul_(2);
  plain.view({3, 8}).narrow(1, 2, 4).mul_(2);
  CHECK(same(full_tensor(x), plain));
  CHECK(same(full_tensor(first), plain.view({3, 8})));
  CHECK_THROWS_WITH(full_tensor(other), doctest::Contains("has been written since"));
  CHECK_THROWS_WITH(other.add_(1), doctest::Contains("has been written since"));
  CHECK_THROWS_WITH_AS(at::_foreach_add_({x, first}, 1), doctest::Contains("one of the writes would be lost"),
                       std::invalid_argument);
  at::_foreach_add_({first, part}, 1);
  plain.add_(1);
  plain.view({3, 8}).narrow(1, 2, 4).add_(1);
  CHECK(same(full_tensor(x), plain));
  CHECK(same(full_tensor(first), plain.view({3, 8})));
  to_local(x).add_(1);
  CHECK_THROWS_WITH(full_tensor(part), doctest::Contains("has been written since"));
}

TESSERA_RANKS_TEST_CASE("gradients go through views that were copied and written", {1, 2, 3, 4}) {
  const at::Tensor whole = sample({4, 6});
  for (const View& view : views()) {
    const auto is = [&](const char* text) { return view.name.find(text) != std::string::npos; };
    if (is("expand") || is("detach") || is("parts") || is("unfold") || is("view of a view")) continue;
    const auto loss = [&](const at::Tensor& leaf) {
      const at::Tensor x = leaf * 1.5;
      const at::Tensor y = view.of(x);
      y.mul_(y.detach().cos());
      y.narrow(0, 0, 1).add_(2);
      return (x * x).sum() + view.of(x).exp().sum();
    };
    const bool one_of_many = is("split") || is("chunk") || is("unbind");  // LibTorch does not allow writing these
    const at::Tensor plain = leaf(whole);
    if (one_of_many || view.of(whole).scalar_type() != at::kDouble) continue;
    loss(plain).backward();
    for (const DeviceMesh& mesh : meshes()) {
      for (const Placements& layout : all_layouts(mesh.ndim(), {R, S0, S1})) {
        CAPTURE(view.name);
        CAPTURE(to_string(layout));
        const at::Tensor d = leaf(whole, mesh, layout);
        loss(d).backward();
        CHECK(close(full_tensor(d.grad()), plain.grad()));
        CHECK(placements_of(d.grad()) == layout);
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("bringing a write to a copy back is communication where pieces lie on other ranks", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({64, 64}), mesh, {S0}), plain = sample({64, 64});
  const at::Tensor y = x.unfold(0, 2, 2);
  REQUIRE(placements_of(y) == Placements{S1});  // by an exchange
  CHECK(explain_op("aten::zero_", {y}).to_string().find("what is written to a view of") != std::string::npos);
  {
    const Strict strict;
    CHECK_THROWS_WITH(y.zero_(), doctest::Contains("what is written to a view of"));
  }
  CHECK(same(full_tensor(x), plain));
  const CommCounter counter(mesh);
  y.zero_();
  REQUIRE(counter.records().size() == 1);
  CHECK(counter.records()[0].op == "aten::zero_");
  CHECK(full_tensor(x).eq(0).all().item<bool>());
  const at::Tensor element = x[1][2];
  const Strict strict;
  CHECK_NOTHROW(element.fill_(3));  // each rank takes its piece of what all have
}

TESSERA_RANKS_TEST_CASE("a copy stays one when it changes its shape in place", {2}) {
  const DeviceMesh mesh = line();
  for (const bool inference : {false, true}) {
    const c10::InferenceMode mode(inference);
    const at::Tensor x = spread(sample({4, 6}), mesh, {S1});
    const at::Tensor copy = x.view({3, 8});
    copy.t_();
    CHECK(same(full_tensor(copy), sample({4, 6}).view({3, 8}).t()));
    copy.zero_();
    CHECK(full_tensor(x).eq(0).all().item<bool>());
    x.add_(1);
    CHECK_THROWS_WITH(full_tensor(copy), doctest::Contains("has been written since"));
    // A tensor that is itself a view stays a copy too.
    const at::Tensor row = x.select(0, 1).unsqueeze_(0);
    row.zero_();
    CHECK(full_tensor(x.select(0, 1)).eq(0).all().item<bool>());
    const at::Tensor flat = x.view({3, 8});
    row.add_(1);
    CHECK_THROWS_WITH(to_local(flat), doctest::Contains("has been written since"));
  }
}

TESSERA_RANKS_TEST_CASE("out= of operators that decompose writes a copy too", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({4, 6}), mesh, {S1}), plain = sample({4, 6});
  at::Tensor copy = x.view({3, 8}), want = plain.view({3, 8});
  at::eye_out(copy, 3, 8);
  at::eye_out(want, 3, 8);
  CHECK(same(full_tensor(x), plain));
  at::Tensor element = x[1][2], one = plain[1][2];
  at::mean_out(element, x * 2, at::IntArrayRef({0, 1}));
  at::mean_out(one, plain * 2, at::IntArrayRef({0, 1}));
  CHECK(close(full_tensor(x), plain));
}

TESSERA_RANKS_TEST_CASE("what cannot be brought back from a copy is refused on every rank", {2, 3}) {
  const DeviceMesh mesh = line();
  const auto refused = [](const at::Tensor& t, const char* text) {
    CHECK_THROWS_WITH_AS(t.fill_(1), doctest::Contains(text), std::invalid_argument);
  };
  const char* const would_not_change = "the viewed tensor would not change";
  const at::Tensor windows = spread(sample({4, 6}), mesh, {S0}).unfold(1, 2, 1);  // whose elements share addresses
  refused(windows.unfold(0, 2, 1)[0][0][1][0], would_not_change);
  refused(spread(sample({6}), mesh, {S0}).expand({4, 6}).unfold(1, 2, 1)[0][0][0], would_not_change);
  const at::Tensor waves = spread(at::complex(sample({4, 6}), sample({4, 6}, 1)), mesh, {S0});
  refused(at::imag(waves.conj()).unfold(0, 2, 1), would_not_change);  // a copy of a copy
  refused(at::imag(waves.conj())[1][2], would_not_change);
  refused(at::imag(waves.unfold(0, 2, 1).conj()), would_not_change);

  const at::Tensor x = spread(sample({4, 6}), mesh, {S0}), y = x[0][0], other = x * 2, one = y.clone();
  CHECK_THROWS_WITH_AS(at::_foreach_add_({y, other}, {one, x}), doctest::Contains("what it reads may be old"),
                       std::invalid_argument);
  at::_foreach_add_({y}, {one});
  at::Tensor want = sample({4, 6});
  want[0][0].mul_(2);
  CHECK(close(full_tensor(x), want));
}

TESSERA_RANKS_TEST_CASE("a view of an inference tensor is one in every mode, and is not saved for a gradient",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor plain = in_mode(true, [] { return sample({4, 6}); });
  const at::Tensor weight = leaf(sample({4}, 1), mesh, {R});
  for (const Placement& cut : {S0, S1, R}) {
    CAPTURE(to_string(cut));
    const at::Tensor x = in_mode(true, [&] { return spread(plain, mesh, {cut}); });
    REQUIRE(x.is_inference());
    for (const View& view : views()) {
      CAPTURE(view.name);
      for (int call = 0; call < 2; ++call) CHECK(view.of(x).is_inference());
    }
    CHECK_THROWS_WITH(x.t() * weight, doctest::Contains("Inference tensors cannot be saved for backward"));
    CHECK_THROWS_WITH(x.t().fill_(1), doctest::Contains("Inplace update to inference tensor outside InferenceMode"));
  }
}

TESSERA_RANKS_TEST_CASE("a tensor that is distributed in place under InferenceMode has views", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({3, 6}), values = sample({5, 6}, 1);
  at::Tensor weight;
  const auto use = [&] {
    CHECK(weight.is_inference());
    CHECK(weight.t().is_inference());
    for (int call = 0; call < 2; ++call) {
      CHECK(same(full_tensor(weight.t()), values.t()));
      CHECK(close(full_tensor(at::linear(spread(x, mesh, {R}), weight)), at::linear(x, values)));
    }
  };
  {
    const c10::InferenceMode mode;
    weight = values.clone();
    distribute_in_place(weight, mesh, {S0}, kNoSource);
    use();
    weight.t().mul_(1);
  }
  use();
}

TESSERA_RANKS_TEST_CASE("a list that writes a pending sum in a copy, and a view of it, is refused", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({4, 6}), mesh, {P}), want = sample({4, 6});
  const auto refused = [](const std::vector<at::Tensor>& list) {
    CHECK_THROWS_WITH_AS(at::_foreach_add_(list, 1), doctest::Contains("which would not have what is written"),
                         std::invalid_argument);
  };
  refused({x, x.alias()});
  refused({x, x.detach().t()});
  refused({x.select(0, 1), x.view({24})});
  CHECK(close(full_tensor(x), want));
  at::_foreach_add_({x, x}, 1);
  at::_foreach_add_({x.narrow(0, 0, 2), x.narrow(0, 2, 2)}, 1);
  CHECK(close(full_tensor(x), want + 3));
  const at::Tensor base = spread(sample({4, 6}), mesh, {S0}), rows = base.narrow(0, 0, 4);
  const at::Tensor other = spread(sample({4, 6}), mesh, {S1});
  CHECK_THROWS_WITH_AS(at::_foreach_add_({rows, other}, {rows, base}),
                       doctest::Contains("is read again beside tensor 1"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("a view over a mesh dimension of one rank is written alike on all ranks", {2, 4}) {
  const DeviceMesh mesh = mesh_over({1, world()->size()});
  const auto check = [&](at::IntArrayRef sizes, const Placements& layout, at::Tensor (*of)(const at::Tensor&)) {
    const at::Tensor plain = sample(sizes), x = spread(plain.clone(), mesh, layout);
    of(x).fill_(100);
    of(plain).fill_(100);
    CHECK(same(full_tensor(x), plain));
  };
  check({2, 1, 4}, {S1, S2}, [](const at::Tensor& t) { return t.unfold(2, 4, 5).squeeze(); });
  check({1, 4}, {S1, S0}, [](const at::Tensor& t) { return t.t().unfold(0, 4, 4); });
  check({7, 2, 1}, {R, R}, [](const at::Tensor& t) { return at::real(at::view_as_complex(t.transpose(1, 2))); });
  check({1, 2, 1}, {R, S0}, [](const at::Tensor& t) { return at::real(at::view_as_complex(t.transpose(1, 2))); });
}

TESSERA_RANKS_TEST_CASE("a view of all of a tensor adds to it, also where a piece has one row", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto check = [&](const at::Tensor& plain, at::Tensor (*part)(const at::Tensor&),
                         at::Tensor (*all)(const at::Tensor&)) {
    for (const Placement& cut : {S0, S1}) {
      const at::Tensor x = spread(plain.clone(), mesh, {cut}), want = plain.clone();
      part(x).add_(all(part(x)));
      part(want).add_(all(part(want)));
      CHECK(close(full_tensor(x), want));
    }
  };
  check(
      sample({3, 5}), [](const at::Tensor& t) { return t.slice(1, 0, 2); },
      [](const at::Tensor& t) {
        return t.view({3, 2});
      });
  check(
      sample({3, 6, 6}), [](const at::Tensor& t) { return t.transpose(1, 2); },
      [](const at::Tensor& t) { return t.squeeze(1); });
}
