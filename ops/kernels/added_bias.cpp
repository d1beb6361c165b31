#include "tessera/ops/kernels/added_bias.h"

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/tangent.h"

namespace tessera {
namespace {

// Says whether each rank has the bias of its part of a product of `ndim` dimensions: the bias is cut where the last
// dimension is, and whole elsewhere.
bool is_cut_as(const Placements& product, int64_t ndim, const Placements& bias) {
  for (std::size_t i = 0; i < product.size(); ++i) {
    const bool features = product[i].is_shard(ndim - 1);
    if (features ? bias[i] != product[i].on(0) : !bias[i].is_replicate()) return false;
  }
  return true;
}

}  // namespace

bool adds_within(const Placements& placements, const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias) {
  if (!is_dtensor(x) || !is_dtensor(w) || !is_dtensor(bias) || x.dim() < 3 || w.dim() != 2 || bias.dim() != 1)
    return false;
  const Spec &of_w = spec_of(w), &of_bias = spec_of(bias);
  if (!(of_w.mesh == of_bias.mesh) || of_w.sizes[1] != of_bias.sizes[0] || any_partial(placements)) return false;
  if (x.scalar_type() != of_w.dtype || of_w.dtype != of_bias.dtype) return false;
  Placements product = placements;
  for (std::size_t i = 0; i < product.size(); ++i) {
    const Placement& of_columns = of_w.placements[i];
    if (placements[i].is_shard(x.dim() - 1) || !(of_columns.is_replicate() || of_columns.is_shard(1))) return false;
    if (of_columns.is_replicate()) continue;
    if (!placements[i].is_replicate()) return false;
    product[i] = of_columns.on(x.dim() - 1);
  }
  return is_cut_as(product, x.dim(), of_bias.placements);
}

bool adds_in_place(const at::Tensor& product, const at::Tensor& bias) {
  if (!is_dtensor(product) || !is_dtensor(bias) || bias.dim() != 1 || product.dim() < 2) return false;
  const Spec &of = spec_of(product), &added = spec_of(bias);
  if (of.partial || !(of.mesh == added.mesh) || of.dtype != added.dtype || of.sizes.back() != added.sizes[0])
    return false;
  if (detail::has_tangent(product) || detail::has_tangent(bias)) return false;
  return is_cut_as(of.placements, of.ndim(), added.placements);
}

}  // namespace tessera
