// Tests norms, and reductions with a mask, pending on one or two of two mesh dimensions: the value, and the gradient of
// a piece, for every target layout. Ranks are threads.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/dtensor/thrown.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;
using Sizes = std::vector<int64_t>;

namespace {

const Sizes kShape = {5, 4};

// Holds a pending reduction, and what one process computes from the pieces of all ranks as rows.
struct Kind {
  Placement placement;
  std::function<at::Tensor(const at::Tensor&)> reduce;
  double left_out = 0;  // what an element outside the mask counts as
  bool is_masked = false;
};

at::Tensor norm(const at::Tensor& rows, double p) { return rows.abs().pow(p).sum(0).pow(1 / p); }

std::vector<Kind> kinds() {
  return {{NormPartial(1), [](const at::Tensor& rows) { return norm(rows, 1); }},
          {NormPartial(3), [](const at::Tensor& rows) { return norm(rows, 3); }},
          {MaskedPartial(), [](const at::Tensor& rows) { return rows.sum(0); }, 0, true},
          {MaskedPartial(ReduceOp::kMax), [](const at::Tensor& rows) { return rows.amax(0); }, -1e300, true}};
}

// Holds the index of this rank's piece among those that are reduced, and their number.
struct Share {
  int64_t index = 0;
  int64_t count = 1;
};

Share share_of(const DeviceMesh& mesh, const Placements& from) {
  Share out;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (!from[i].is_partial()) continue;
    const auto mesh_dim = static_cast<int64_t>(i);
    out.index = out.index * mesh.size(mesh_dim) + mesh.local_rank(mesh_dim);
    out.count *= mesh.size(mesh_dim);
  }
  return out;
}

bool has_value(const at::Tensor& t, const at::Tensor& whole) {
  if (any_partial(placements_of(t))) return close(full_tensor(t), whole);
  return close(to_local(t), piece_of(whole, mesh_of(t), placements_of(t)));
}

void check_from(const Kind& kind, const Placements& from, const DeviceMesh& mesh) {
  const Share share = share_of(mesh, from);
  const at::Tensor weight = sample(kShape, 5);
  const at::Tensor rows = sample({share.count, 5, 4}, 1).requires_grad_(true);
  // Every element counts in some piece, but not in all.
  const at::Tensor counts =
      (at::arange(share.count, on(at::kLong)).view({-1, 1, 1}) + at::arange(20, on(at::kLong)).view({1, 5, 4}))
          .remainder(2) == 0;
  const at::Tensor masks = kind.is_masked ? counts : at::ones_like(counts);
  const at::Tensor want = kind.reduce(at::where(masks, rows, at::full_like(rows, kind.left_out)));
  (want * weight).sum().backward();

  const at::Tensor mask = piece_of(masks[share.index], mesh, from);
  const at::Tensor gradient = piece_of(rows.grad()[share.index], mesh, from);
  for (const Placements& to : std::vector<Placements>{
           {R, R}, {S0, S0}, {S0, R}, {R, S1}, {S0, S1}, {S1, S0}, {P, P}, {P, R}, {R, P}, {S1, P}, {P, S0}}) {
    CAPTURE(to_string(from));
    CAPTURE(to_string(to));
    const at::Tensor piece = piece_of(rows[share.index], mesh, from).clone().requires_grad_(true);
    FromLocalOptions options{.shape = kShape};
    if (kind.is_masked) options.mask = mask;
    const at::Tensor moved = redistribute(from_local(piece, mesh, from, options), to);
    CHECK(placements_of(moved) == to);
    CHECK(has_value(moved.detach(), want.detach()));
    (full_tensor(moved) * weight).sum().backward();
    CHECK(close(piece.grad(), gradient));
    CHECK(at::all(at::eq(piece.grad(), 0).logical_or(mask)).item<bool>());
  }
}

void check_terms(const Placement& placement, const DeviceMesh& mesh) {
  const at::Tensor whole = whole_numbers(kShape);
  for (const Placements& from :
       std::vector<Placements>{{placement, placement}, {placement, S0}, {S1, placement}, {R, placement}}) {
    CAPTURE(to_string(from));
    const at::Tensor source = spread(whole, mesh, from);
    CHECK(close(full_tensor(source), whole));
    for (const Placements& to : std::vector<Placements>{{S0, S1}, {P, P}, {R, S0}}) {
      CAPTURE(to_string(to));
      CHECK(has_value(redistribute(source, to), whole));
      CHECK(close(full_tensor(redistribute(redistribute(source, to), from)), whole));
    }
  }
}

void on_meshes(const std::function<void(const DeviceMesh&)>& body) {
  for (const Sizes& shape : {Sizes{2, 2}, Sizes{2, 3}}) {
    run_in_process(shape[0] * shape[1], [&](const std::shared_ptr<World>& world) {
      body(init_device_mesh(device_name(), shape, {}, world));
    });
  }
}

// Stacks terms, or values, on themselves, so that they have other sizes than their pieces.
class Stacking final : public Reduction {
 public:
  explicit Stacking(bool terms) : Reduction(terms ? "stacked terms" : "stacked value", ReduceOp::kSum), terms_(terms) {}
  at::Tensor to_term(const at::Tensor& piece) const override { return terms_ ? at::stack({piece, piece}) : piece; }
  at::Tensor from_terms(const at::Tensor& terms, int64_t) const override {
    return terms_ ? terms : at::stack({terms, terms});
  }

 private:
  const bool terms_;
};

}  // namespace

TEST_CASE("norms and masked reductions: the value in every target layout, and no gradient where masked out") {
  on_meshes([](const DeviceMesh& mesh) {
    for (const Kind& kind : kinds()) {
      const Placement& K = kind.placement;
      for (const Placements& from : std::vector<Placements>{{K, K}, {K, R}, {R, K}, {K, S0}, {S1, K}}) {
        check_from(kind, from, mesh);
      }
    }
  });
}

TEST_CASE("norms of other orders than two: there and back") {
  on_meshes([](const DeviceMesh& mesh) {
    for (const double order : {1.0, 3.0}) check_terms(NormPartial(order), mesh);
  });
}

TEST_CASE("terms or a value of other sizes than the pieces are refused on every rank") {
  for (const bool terms : {true, false}) {
    const std::string want = terms ? "Reduction::to_term of P(stacked terms) has made a tensor [2, "
                                   : "Reduction::from_terms of P(stacked value) has made a tensor [2, ";
    CAPTURE(want);
    for (const Placement& to : {R, S0, S1}) {
      CAPTURE(to_string(to));
      const std::vector<std::string> texts = thrown([&](const DeviceMesh& mesh, bool) {
        const Placement stacking = Partial(std::make_shared<const Stacking>(terms));
        redistribute(from_local(sample({5, 4}), mesh, {stacking}), {to});
      });
      for (const std::string& text : texts) CHECK_MESSAGE(text.find(want) != std::string::npos, text);
    }
  }
}
