#include "tessera/ops/kernels/matmul.h"

#include <array>
#include <numeric>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/matmul_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "tessera/dtensor/backward_node.h"
#include "tessera/dtensor/dispatch/unboxed.h"
#include "tessera/dtensor/tangent.h"

namespace tessera {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// These describe our operators as LibTorch's at::_ops describe its own.
template <class Op, class... Tensors>
struct OwnOpOf {
  using schema = at::Tensor(const Tensors&...);
  static constexpr const char* overload_name = "";
  static at::Tensor call(const Tensors&... tensors) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, "").template typed<schema>();
    return op.call(tensors...);
  }
};
template <class Op>
using OwnOp = OwnOpOf<Op, at::Tensor, at::Tensor>;
struct Dense : OwnOp<Dense> {
  static constexpr const char* name = "tessera::dense";
};
struct DenseBias : OwnOpOf<DenseBias, at::Tensor, at::Tensor, at::Tensor> {
  static constexpr const char* name = "tessera::dense_bias";
};
struct DenseWgrad : OwnOp<DenseWgrad> {
  static constexpr const char* name = "tessera::dense_wgrad";
};
struct BatchedMatmul : OwnOp<BatchedMatmul> {
  static constexpr const char* name = "tessera::batched_matmul";
};

// ---- on plain tensors ------------------------------------------------------------------------------------------

at::Tensor rows_of(const at::Tensor& t) {
  return t.reshape({t.numel() / std::max<int64_t>(t.size(-1), 1), t.size(-1)});
}

// Where the rows of x are adjacent, this calls what at::matmul calls then, without its search for a way.
at::Tensor dense_plain(const at::Tensor& x, const at::Tensor& w) {
  if (x.dim() < 3 || w.dim() != 2 || !x.is_contiguous() || x.numel() == 0) return at::matmul(x, w);
  c10::SmallVector<int64_t, 5> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = w.size(1);
  return at::_unsafe_view(at::mm(x.view({-1, x.size(-1)}), w), sizes);
}

at::Tensor dense_bias_plain(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias) {
  return at::linear(x, w.t(), bias);
}

// Returns the gradient in the memory order of a linear layer's weight, [n, k]. In another order it would be copied
// again into .grad.
at::Tensor dense_wgrad_plain(const at::Tensor& x, const at::Tensor& g) {
  if (x.numel() == 0 || g.numel() == 0) return at::zeros({g.size(-1), x.size(-1)}, g.options()).t();
  return at::mm(rows_of(g).t(), rows_of(x)).t();
}

at::Tensor batched_matmul_plain(const at::Tensor& a, const at::Tensor& b) { return at::matmul(a, b); }

// ---- gradients -------------------------------------------------------------------------------------------------

// Computes the gradients of a product by `Gradients`. Each factor is needed for the other's.
template <class Op, class Gradients>
struct ProductFormula {
  static constexpr const char* kName = Op::name;
  variable_list operator()(const Node& node, const variable_list& saved, const variable_list& gradients) const {
    const at::Tensor& g = gradients[0];
    return {node.task_should_compute_output(0) ? Gradients::first(saved[0], saved[1], g) : at::Tensor(),
            node.task_should_compute_output(1) ? Gradients::second(saved[0], saved[1], g) : at::Tensor()};
  }
};

// Calls the operator below autograd, and records its formula.
template <class Op, class Gradients>
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return detail::record({a, b}, {detail::kept_for(b, a), detail::kept_for(a, b)}, ProductFormula<Op, Gradients>(), [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return Op::call(a, b);
  });
}

// Factors are conjugated, which does nothing to real ones.
struct DenseGradients {
  static at::Tensor first(const at::Tensor&, const at::Tensor& w, const at::Tensor& g) {
    return Dense::call(g, w.t().conj());
  }
  static at::Tensor second(const at::Tensor& x, const at::Tensor&, const at::Tensor& g) {
    return DenseWgrad::call(x.conj(), g);
  }
};
// W = x^T g. Its gradient G gives x the gradient g G^T, and g the gradient x G.
struct WgradGradients {
  static at::Tensor first(const at::Tensor&, const at::Tensor& g, const at::Tensor& grad) {
    return Dense::call(g.conj(), grad.t());
  }
  static at::Tensor second(const at::Tensor& x, const at::Tensor&, const at::Tensor& grad) {
    return Dense::call(x.conj(), grad);
  }
};
struct BatchedGradients {
  static at::Tensor first(const at::Tensor&, const at::Tensor& b, const at::Tensor& g) {
    return BatchedMatmul::call(g, b.transpose(-2, -1).conj());
  }
  static at::Tensor second(const at::Tensor& a, const at::Tensor&, const at::Tensor& g) {
    return BatchedMatmul::call(a.transpose(-2, -1).conj(), g);
  }
};

// Computes those of dense with a bias, whose gradient is the sum of the result's over the leading dimensions.
struct BiasedFormula {
  static constexpr const char* kName = DenseBias::name;
  variable_list operator()(const Node& node, const variable_list& saved, const variable_list& gradients) const {
    variable_list out = ProductFormula<Dense, DenseGradients>()(node, saved, gradients);
    out.push_back(node.task_should_compute_output(2) ? sum_rows(gradients[0]) : at::Tensor());
    return out;
  }
};

// ---- in forward mode ------------------------------------------------------------------------------------------

// LibTorch's C++ functions carry no tangents. Of operands that have one the products are made of operators that do.
bool in_forward_mode(const at::Tensor& a, const at::Tensor& b) {
  return detail::has_tangent(a) || detail::has_tangent(b);
}

// With one batch dimension in the place of all: [*, m, n] as [b, m, n].
at::Tensor one_batch(const at::Tensor& t) {
  if (t.dim() == 2) return t.unsqueeze(0);
  return t.dim() == 3 ? t : t.flatten(0, -3);
}

at::Tensor batched_by_bmm(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor product = at::bmm(one_batch(a), one_batch(b));
  if (a.dim() == 3) return product;
  std::vector<int64_t> sizes = a.sizes().vec();
  sizes.back() = b.size(-1);
  return product.view(sizes);
}

at::Tensor dense_by_bmm(const at::Tensor& x, const at::Tensor& w) {
  if (x.dim() == 2) return at::mm(x, w);
  const at::Tensor rows = one_batch(x);
  const at::Tensor product = at::bmm(rows, w.unsqueeze(0).expand({rows.size(0), w.size(0), w.size(1)}));
  if (x.dim() == 3) return product;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = w.size(1);
  return product.view(sizes);
}

at::Tensor dense_wgrad_by_bmm(const at::Tensor& x, const at::Tensor& g) {
  return at::bmm(one_batch(x).transpose(1, 2), one_batch(g)).sum(0);
}

at::Tensor dense_autograd(const at::Tensor& x, const at::Tensor& w) {
  if (in_forward_mode(x, w)) return dense_by_bmm(x, w);
  return product<Dense, DenseGradients>(x, w);
}
at::Tensor dense_bias_autograd(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias) {
  if (in_forward_mode(x, w) || detail::has_tangent(bias)) return dense_by_bmm(x, w).add(bias);
  return detail::record({x, w, bias}, {detail::kept_for(w, x), detail::kept_for(x, w)}, BiasedFormula(), [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return DenseBias::call(x, w, bias);
  });
}
at::Tensor dense_wgrad_autograd(const at::Tensor& x, const at::Tensor& g) {
  if (in_forward_mode(x, g)) return dense_wgrad_by_bmm(x, g);
  return product<DenseWgrad, WgradGradients>(x, g);
}
at::Tensor batched_matmul_autograd(const at::Tensor& a, const at::Tensor& b) {
  if (in_forward_mode(a, b)) return batched_by_bmm(a, b);
  return product<BatchedMatmul, BatchedGradients>(a, b);
}

TORCH_LIBRARY(tessera, m) {
  m.def("dense(Tensor x, Tensor w) -> Tensor");
  m.def("dense_bias(Tensor x, Tensor w, Tensor bias) -> Tensor");
  m.def("dense_wgrad(Tensor x, Tensor g) -> Tensor");
  m.def("batched_matmul(Tensor a, Tensor b) -> Tensor");
}
// These are registered per backend, since composite kernels would be preferred to the DTensor fallback.
void register_plain(torch::Library& m) {
  m.impl("dense", dense_plain);
  m.impl("dense_bias", dense_bias_plain);
  m.impl("dense_wgrad", dense_wgrad_plain);
  m.impl("batched_matmul", batched_matmul_plain);
}
TORCH_LIBRARY_IMPL(tessera, CPU, m) { register_plain(m); }
TORCH_LIBRARY_IMPL(tessera, CUDA, m) { register_plain(m); }
TORCH_LIBRARY_IMPL(tessera, Meta, m) { register_plain(m); }
TORCH_LIBRARY_IMPL(tessera, Autograd, m) {
  m.impl("dense", dense_autograd);
  m.impl("dense_bias", dense_bias_autograd);
  m.impl("dense_wgrad", dense_wgrad_autograd);
  m.impl("batched_matmul", batched_matmul_autograd);
}
[[maybe_unused]] const auto* const handles = new std::array<c10::RegistrationHandleRAII, 4>{
    // for the program's life
    dispatch::register_unboxed<Dense>(), dispatch::register_unboxed<DenseBias>(),
    dispatch::register_unboxed<DenseWgrad>(), dispatch::register_unboxed<BatchedMatmul>()};

}  // namespace

at::Tensor dense(const at::Tensor& x, const at::Tensor& w) { return Dense::call(x, w); }
at::Tensor dense_bias(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias) {
  return DenseBias::call(x, w, bias);
}
at::Tensor dense_wgrad(const at::Tensor& x, const at::Tensor& g) { return DenseWgrad::call(x, g); }
at::Tensor sum_rows(const at::Tensor& g) {
  std::vector<int64_t> leading(static_cast<std::size_t>(g.dim() - 1));
  std::iota(leading.begin(), leading.end(), 0);
  return leading.empty() ? g : g.sum(leading);
}
at::Tensor batched_matmul(const at::Tensor& a, const at::Tensor& b) { return BatchedMatmul::call(a, b); }

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) {
  if (a.dim() >= 3 && b.dim() == 2) return Dense::call(a, b);
  // LibTorch squeezes the product with a vector in place, which a DTensor cannot do.
  if (a.dim() == 1 && b.dim() >= 2) return tessera::matmul(a.unsqueeze(0), b).squeeze(-2);
  if (a.dim() >= 3 && b.dim() == 1) return tessera::matmul(a, b.unsqueeze(1)).squeeze(-1);
  if (a.dim() < 3 || b.dim() < 3) return at::compositeimplicitautograd::matmul(a, b);
  const auto batch = at::infer_size(a.sizes().slice(0, static_cast<std::size_t>(a.dim() - 2)),
                                    b.sizes().slice(0, static_cast<std::size_t>(b.dim() - 2)));
  const auto spread = [&](const at::Tensor& t) {
    std::vector<int64_t> shape(batch.begin(), batch.end());
    shape.push_back(t.size(-2));
    shape.push_back(t.size(-1));
    return t.sizes() == at::IntArrayRef(shape) ? t : t.expand(shape);
  };
  return BatchedMatmul::call(spread(a), spread(b));
}

}  // namespace tessera
