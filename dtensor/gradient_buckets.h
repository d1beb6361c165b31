#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera {

struct GradientBucketOptions {
  // Is the most that a bucket holds, in bytes of what one rank reduces; a larger gradient gets a bucket of its own.
  // With 0 each gradient is reduced by itself.
  int64_t bucket_bytes = int64_t{25} << 20;
  // Is the dtype in which gradients are sent and reduced; nullopt: their own.
  std::optional<at::ScalarType> dtype = {};
  // Sets the cost model that the reductions of buckets are planned by, the same on every rank, such as measured_costs
  // of the mesh. The gradients of a bucket share the latency of a step, so that only bandwidths count. Where one mesh
  // dimension is slower than another, a bucket is reduced and scattered along the faster one, reduced along the slower
  // one and gathered again. Without links it is default_cost_model (dtensor/redistribute/route.h).
  CostModel cost_model = {};
};

// Names a parameter, which is a DTensor, and the layout that its gradient gets, on the parameter's mesh.
struct BucketedParameter {
  at::Tensor parameter;
  Placements gradient;
};

// Reduces the gradients of `parameters`, which lie on one mesh, in buckets from now on: several gradients by the same
// collectives. A bucket is started when its last gradient has been computed, and backward goes on meanwhile; at most
// two are under way. When backward returns, the gradients are in .grad, or added to it, as autograd does it. A
// gradient counts as pending over the data dimensions also where it comes reduced, as that of a penalty on the weights
// does: the next one may not. Those that need no collective even so are in no bucket. The .grad of a bucket that is
// all-reduced lie in the memory in which they were reduced; it is freed with the last of them, so clone a .grad that
// you keep for long.
//
// `data_dims` are the mesh dimensions over which every gradient is reduced. The first backward assumes that gradients
// come from the last parameter to the first, and that they are pending on these mesh dimensions alone; what is pending
// on others is reduced for each parameter by itself. The second backward begins with an exchange of what the ranks have
// seen in the first (one all-gather of 16 bytes over all mesh dimensions, and one more of a text if ranks differ).
// From then on buckets follow the order in which gradients come, and reduce over all mesh dimensions.
//
// A parameter may be frozen and trained again (set_requires_grad), and its dtype may change, between one backward and
// the next and on every rank alike: buckets follow when the next backward begins. Nothing is sent for a parameter that
// is frozen. After the first backward that could train a parameter, the next one begins with the exchange; where its
// first gradient comes in a later one, the exchange follows the backward after that, once, and a parameter that has no
// gradient in it stays behind those that are ordered. If parameters change on some ranks alone, buckets differ: Checked
// refuses it, and without it the job hangs or gradients are wrong.
//
// A parameter that has no gradient on some rank counts as zero there; if it has none on any rank, its .grad is not
// touched. Each bucket also reduces one number per parameter to know that. A backward in which a rank has no gradient
// of any of these parameters must have none on the others either, also under AccumulateGradients.
//
// A rank that lacks a gradient starts its bucket, and those behind it, when its backward ends: later than the others.
// Between that moment and theirs backward must run no other collective over these mesh dimensions, such as that of a
// batch norm or of the buckets of another call, since the ranks would start them in different orders: gradients could
// be swapped, or the job would hang. Checked refuses it. With `bucket_bytes` 0, and for a parameter with hooks of the
// user's own, every rank must have the gradient; and every rank must have such hooks, since the gradient is reduced by
// a collective of its own. A gradient that comes several times in one backward, as under activation checkpoints, must
// come as often on every rank.
//
// A gradient is reduced by itself, at once, where it is not added to .grad (torch::autograd::grad), with create_graph,
// where the parameter has hooks of the user's own, and where another reduction than a sum or an average is pending.
//
// Parameters that can have no gradient, such as those of integers, are passed over. Does not communicate itself. Throws
// std::invalid_argument, alike on every rank, on a tensor that is no DTensor, on parameters of several meshes, on one
// that is listed twice, on a gradient's layout with Partial or of another number of placements than the mesh has
// dimensions, on data dimensions and a cost model that do not fit the mesh, on a dtype that is not floating, and on a
// negative number of bytes.
void bucket_gradients(std::vector<BucketedParameter> parameters, const MeshDims& data_dims,
                      const GradientBucketOptions& options = {});

namespace detail {
// Throws std::invalid_argument, prefixed with `who`, on options that bucket_gradients refuses.
void check_bucket_options(const GradientBucketOptions& options, int64_t mesh_ndim, const std::string& who);
}  // namespace detail

// While it lives, gradients of parameters on meshes of `mesh`'s World are added up on each rank and not reduced. The
// first backward after it reduces the sum. Use it for all micro-batches but the last:
//
//   for (int64_t i = 0; i < count; ++i) {
//     std::optional<AccumulateGradients> guard;
//     if (i + 1 < count) guard.emplace(mesh);
//     loss_of(batch(i)).div(count).backward();
//   }
//
// Until then .grad is a DTensor with pending reductions, as large as the parameter is without its cuts over data
// dimensions; on a rank that had no gradient of the parameter meanwhile it stays as it was. What a .grad held before,
// reduced, becomes a term of the sum on every rank, and is sent as gradients are (GradientBucketOptions::dtype). A
// parameter with hooks of the user's own is reduced in each backward all the same.
class AccumulateGradients {
 public:
  explicit AccumulateGradients(const DeviceMesh& mesh);
  ~AccumulateGradients();
  AccumulateGradients(const AccumulateGradients&) = delete;
  AccumulateGradients& operator=(const AccumulateGradients&) = delete;

 private:
  const DeviceMesh mesh_;
};

}  // namespace tessera
