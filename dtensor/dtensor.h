#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera {

// A DTensor is an at::Tensor with global sizes whose pieces (local tensors) are held by the ranks of a mesh. LibTorch's
// operators, autograd, optimizers and modules take it as they take any tensor. The functions below read and change its
// layout.

bool is_dtensor(const at::Tensor& t);

// Return a DTensor's description, or parts of it. Throw std::invalid_argument on a plain tensor; the error names
// `from_local` and `distribute_tensor`.
const Spec& spec_of(const at::Tensor& t);
SpecPtr spec_ptr_of(const at::Tensor& t);
const DeviceMesh& mesh_of(const at::Tensor& t);
const Placements& placements_of(const at::Tensor& t);
// Returns the meshes of the DTensors among `tensors`, each once, in order of appearance.
std::vector<DeviceMesh> meshes_of(const std::vector<at::Tensor>& tensors);

struct FromLocalOptions {
  // Sets the global shape. Without it every piece of a sharded dimension is taken to have this rank's size, so uneven
  // pieces need it.
  std::optional<std::vector<int64_t>> shape = {};
  // Sets the global strides, the same on every rank. Without them the DTensor is row-major, whatever the strides of the
  // piece.
  std::optional<std::vector<int64_t>> stride = {};
  // Compares placements, shape, strides, and the pieces' sizes, dtypes, whether they require a gradient, and (where
  // replicated) their contents over the mesh; where they differ, every rank throws the same error.
  bool check = false;
  // For a MaskedPartial, says which elements of the piece count, by a bool tensor of its sizes. The others become the
  // reduction's neutral element.
  at::Tensor mask = {};
  // If given, the piece's gradient is the DTensor's gradient redistributed to these placements, by which every rank
  // must have as much of the gradient as of the tensor. Default: the derivative with respect to the piece, laid out as
  // `placements` with Partial as Replicate. For a sum that is the value's gradient, for an average the gradient divided
  // by the number of pieces. For P(max), P(min), P(product) and a norm it takes one or two all_reduces of the piece's
  // size in backward; pieces that share an extremum share its gradient. A user's Reduction defines its own derivative;
  // without one backward throws std::runtime_error.
  std::optional<Placements> grad_placements = {};
};

// Returns the global tensor of which `local` is this rank's piece. Shares storage with `local`, and the version by
// which autograd sees writes in place, unless `local` is copied: with a mask; where it is not row-major on this rank
// and no stride was given; and where its dimensions lie in memory in another order than the stride says.
// Differentiable: the gradient is a plain tensor (see grad_placements), of zeros on a rank outside the mesh.
// The result is no view for autograd: with gradients recorded, a write to it in place writes `local` too, and what is
// computed from `local` afterwards has the new values without the write's derivative. Give a clone of what is used
// again.
// Communicates only with `check`: one all_reduce of 40 bytes and two all_gathers per mesh dimension.
// Throws std::invalid_argument, alike on every rank, on placements and options that do not fit each other or the mesh.
// This rank's tensor or mask (its sizes, dtype, device or sparse layout) may be wrong where those of other ranks are
// right: then this rank throws and the job fails; with `check` every rank throws, and the job goes on. Without `shape`
// the same holds for placements that do not fit the shape inferred here.
at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                      const FromLocalOptions& options = {});

// Returns this rank's piece, which shares storage with `dtensor`, or an empty tensor outside the mesh. Does not
// communicate.
// Differentiable. With `grad_placements`, the piece's gradient is this rank's piece of the value's gradient in that
// layout. Without them, it is the derivative with respect to the piece, as in from_local: the value's gradient is laid
// out as the placements with Partial as Replicate, and is the piece's gradient divided by d value / d piece, which is 1
// for a sum and 1 / ranks for an average. Where d value / d piece is not one number, as for P(max), P(min), P(product)
// and a norm, backward throws std::runtime_error. Throws std::invalid_argument, alike on every rank, unless every rank
// has as much of a gradient in the layout of `grad_placements` as of the tensor.
// A write to the piece in place writes `dtensor`: where autograd has saved `dtensor`, backward throws after it, as
// LibTorch's does (not for data(), nor for a parameter after Module::to or clone). A view that needed communication is
// a copy: a write to the viewed tensor's piece, or to the copy's own, counts as one to both, and reading the copy after
// it throws. So write on every rank or on none.
// The piece is no view for autograd: with gradients recorded, the derivative of a write in place is that of the piece
// alone, and what is computed from `dtensor` afterwards has the new values without it. Write to a clone, or under
// NoGradGuard.
// Writes to a piece that is an inference tensor are not counted: take such views again after one.
at::Tensor to_local(const at::Tensor& dtensor, const std::optional<Placements>& grad_placements = std::nullopt);

struct RedistributeOptions {
  // Sets the placements of the input's gradient. Default: the input's own placements; where the input is Partial, the
  // gradient keeps its own placement there (a Partial one becomes Replicate).
  std::optional<Placements> grad_placements = {};
  // forward_dtype is the dtype in which the value is sent, and the result's. backward_dtype is the dtype in which the
  // gradient is sent, before it is converted to the input's. Both default to the input's dtype. A reduce_scatter adds
  // bfloat16 and half in float32 on the CPU and rounds once; an all_reduce rounds as its backend does.
  std::optional<at::ScalarType> forward_dtype = {};
  std::optional<at::ScalarType> backward_dtype = {};
  // Returns once the first collectives are started. The first read of the result waits for it, and every rank must read
  // the results of several calls in the same order. The input must not be written until then, else the read throws
  // std::runtime_error on each rank that has written it: write on every rank or on none. The gradient is asynchronous
  // too, unless backward_dtype differs from the input's. On a GPU the result may be read on another stream than that of
  // the start; a tensor that has the layout already is returned itself, and is as ready as it was.
  bool async = false;
  // Sets the cost model that plans are compared by, the same on every rank. Without links it is default_cost_model
  // (dtensor/redistribute/route.h).
  CostModel cost_model = {};
};

// Returns the same value laid out as `placements`. Returns `dtensor` itself if it has that layout and no option asks
// for anything else; otherwise the result shares no storage with it. placement/plan.h lists the collectives.
// Differentiable.
// Throws std::invalid_argument, alike on every rank, on placements that do not fit the mesh, the shape or the dtype.
at::Tensor redistribute(const at::Tensor& dtensor, const Placements& placements,
                        const RedistributeOptions& options = {});

// Redistributes several tensors of one mesh, dtensors[i] to placements[i], in rounds. In each round, transfers over the
// same mesh dimensions by the same collective are sent as one message per pair of ranks (reductions: one per dtype and
// reduction). The options hold for all. Throws as redistribute, and std::invalid_argument when there are not as many
// placements as tensors, or a tensor is on another mesh.
std::vector<at::Tensor> redistribute_many(const std::vector<at::Tensor>& dtensors,
                                          const std::vector<Placements>& placements,
                                          const RedistributeOptions& options = {});

// Returns the same value on another mesh of the same World, which may have other ranks. Every rank of both meshes calls
// it; a rank outside a mesh holds an empty piece there. Each rank receives the elements of its new piece that it does
// not hold, by one all_to_all over the ranks of both meshes (none if no rank needs any). A pending reduction is carried
// out before that, into the layout that is estimated to be reached soonest. To a mesh on another type of device, each
// rank's new piece is copied in the end. Differentiable: the gradient goes back to the input's mesh, laid out as
// `grad_placements`; default: as the input, with Partial as Replicate.
// Throws as redistribute, and std::invalid_argument on a mesh of another World.
at::Tensor redistribute_to(const at::Tensor& dtensor, const DeviceMesh& mesh, const Placements& placements,
                           const std::optional<Placements>& grad_placements = std::nullopt);

// Returns the whole value as a plain tensor on every rank: redistribute to Replicate, then to_local. Where the DTensor
// is Replicate already, the result shares its memory, as that of to_local does: clone() what must not change with it,
// such as a copy of parameters in training. Throws as they do; so std::invalid_argument on a plain tensor.
at::Tensor full_tensor(const at::Tensor& dtensor, const std::optional<Placements>& grad_placements = std::nullopt);

// Makes a DTensor of a plain tensor that every rank has as a whole. Its values are those of `src_rank` (a global rank;
// default: the mesh's first), sent piece by piece: at most one scatter, over the mesh dimensions that cut it, and one
// broadcast, over the others. With kNoSource each rank keeps its part of its own tensor, without communication: the
// tensors must be equal. Differentiable: the gradient is plain and whole, on the device of `t`, and zeros on a rank
// outside the mesh.
// A DTensor that has this layout already is returned as it is.
// Throws std::invalid_argument, before communicating, on an undefined tensor, a DTensor of another layout, a src_rank
// outside the mesh, and placements that do not fit. Shape, dtype and requires_grad must be the same on every rank; only
// Checked compares shape and dtype, and the collectives of backward.
inline constexpr int64_t kMeshFirstRank = -1;
inline constexpr int64_t kNoSource = -2;
at::Tensor distribute_tensor(const at::Tensor& t, const DeviceMesh& mesh, const Placements& placements,
                             int64_t src_rank = kMeshFirstRank);

// Makes `plain` itself a DTensor: every handle to it (a module's member, an optimizer's parameter, a tied weight) is
// one at once. The values come from the ranks as in distribute_tensor. Keeps requires_grad and dtype, and converts
// .grad in the same way. The piece is on the mesh's device. Throws as distribute_tensor, and std::invalid_argument on
// any DTensor and on an operator's result.
void distribute_in_place(const at::Tensor& plain, const DeviceMesh& mesh, const Placements& placements,
                         int64_t src_rank = kMeshFirstRank);

// Returns "DTensor Float [4, 8] on {tp: 2} on cpu as [S(0)], here [2, 8]".
std::string to_string(const at::Tensor& dtensor);

// Wraps a DTensor, with the functions above as members; converts to at::Tensor implicitly.
//
// Invariant: tensor() is a DTensor.
class DTensor {
 public:
  // Throws std::invalid_argument on a plain tensor.
  explicit DTensor(at::Tensor t);

  const DeviceMesh& mesh() const { return mesh_of(tensor_); }
  const Placements& placements() const { return placements_of(tensor_); }
  at::Tensor to_local(const std::optional<Placements>& grad_placements = std::nullopt) const {
    return tessera::to_local(tensor_, grad_placements);
  }
  DTensor redistribute(const Placements& placements, const RedistributeOptions& options = {}) const {
    return DTensor(tessera::redistribute(tensor_, placements, options));
  }
  at::Tensor full_tensor(const std::optional<Placements>& grad_placements = std::nullopt) const {
    return tessera::full_tensor(tensor_, grad_placements);
  }
  const at::Tensor& tensor() const { return tensor_; }
  operator const at::Tensor&() const { return tensor_; }  // NOLINT: a DTensor is a tensor

 private:
  at::Tensor tensor_;
};
std::string to_string(const DTensor& t);

}  // namespace tessera
