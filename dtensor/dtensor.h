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

// A DTensor is an at::Tensor with global sizes whose pieces lie on the ranks of a mesh. It goes through LibTorch's
// operators, autograd, optimizers and modules as any tensor does. These functions ask and change how it lies.

bool is_dtensor(const at::Tensor& t);

// What a DTensor is. Throws std::invalid_argument on a plain tensor, naming `from_local` and `distribute_tensor`.
const Spec& spec_of(const at::Tensor& t);
SpecPtr spec_ptr_of(const at::Tensor& t);
const DeviceMesh& mesh_of(const at::Tensor& t);
const Placements& placements_of(const at::Tensor& t);
// The meshes of the DTensors among `tensors`, each once, in order of appearance.
std::vector<DeviceMesh> meshes_of(const std::vector<at::Tensor>& tensors);

struct FromLocalOptions {
  // The global shape; without it every piece counts as of this rank's size, so uneven pieces need it.
  std::optional<std::vector<int64_t>> shape;
  // The global strides; without them row-major, whatever the piece's are: every rank must have the same.
  std::optional<std::vector<int64_t>> stride;
  // Compares placements, shape, and the pieces' sizes, dtypes and (where replicated) contents over the mesh; every rank
  // throws alike.
  bool check = false;
  // Of a MaskedPartial: which elements of the piece count, a bool tensor of its sizes. The others become neutral.
  at::Tensor mask;
  // How the gradient of the piece is laid out, as it is. Default: the derivative after the piece, laid out as
  // `placements` with Partial as Replicate. Of a sum it is the value's gradient, of an average that divided by the
  // number of pieces; of P(max), P(min), P(product) and a norm it takes an all_reduce or two of the piece's size in
  // backward, and pieces that are the extremum together share its gradient. A user's Reduction says its own, or
  // backward throws std::runtime_error.
  std::optional<Placements> grad_placements;
};

// The global tensor of which `local` is this rank's piece. Shares storage with `local`, or copies it where it is not
// row-major and no stride was given. Differentiable: the gradient comes back in `grad_placements` as a plain tensor.
// Communicates only with `check`: one all_reduce of 40 bytes and two all_gathers per mesh dimension.
// Throws std::invalid_argument on placements, options or a layout (a sparse tensor) that do not fit, alike on every
// rank. A piece of another size than shape and placements say throws on the rank that has it and fails the job; with
// `check` every rank throws, and the job goes on.
at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                      const FromLocalOptions& options = {});

// This rank's piece, sharing storage. Differentiable: its gradient is taken to be laid out as `grad_placements`;
// default, the placements with Partial as Replicate. No communication. An empty tensor outside the mesh. A write to the
// piece in place writes `dtensor`. A view of `dtensor` whose pieces had to be moved is a copy, and reading it after
// such a write throws. Writes to a piece that is an inference tensor are not counted: after one, take such views again.
at::Tensor to_local(const at::Tensor& dtensor, const std::optional<Placements>& grad_placements = std::nullopt);

struct RedistributeOptions {
  // How the input's gradient is laid out. Default: the input's own placements, except that under a Partial it keeps the
  // layout that it has (Partial becomes Replicate).
  std::optional<Placements> grad_placements;
  // The dtype in which the value travels and that the result has; and in which the gradient travels back, before it
  // gets the input's. Default of both: the input's. A reduce_scatter adds bfloat16 and half in float32 on the CPU and
  // rounds once; an all_reduce rounds as its backend does.
  std::optional<at::ScalarType> forward_dtype;
  std::optional<at::ScalarType> backward_dtype;
  // Returns when the first collectives are under way; the first that reads the result waits, and every rank must read
  // the results of several in the same order. The input may not be written until then: the reader would throw
  // std::runtime_error. Holds for the gradient too, unless backward_dtype is another than the input's. On CUDA begin
  // and read in one stream.
  bool async = false;
  // What plans are compared by, alike on every rank. Without links: default_cost_model (dtensor/redistribute/route.h).
  CostModel cost_model;
};

// The same value laid out as `placements`; `dtensor` itself when it is so already and no option says otherwise. Never
// aliases otherwise. Collectives: placement/plan.h. Differentiable.
// Throws std::invalid_argument on placements that do not fit the mesh, the shape or the dtype, alike on every rank.
at::Tensor redistribute(const at::Tensor& dtensor, const Placements& placements,
                        const RedistributeOptions& options = {});

// The same of several tensors of one mesh, dtensors[i] to placements[i], in rounds: in each, what all of them send over
// the same mesh dimensions goes as one message from each rank to each (reductions: one for each dtype and kind). The
// options hold for all. Throws, too, when there are not as many placements as tensors, or a tensor lies on another
// mesh.
std::vector<at::Tensor> redistribute_many(const std::vector<at::Tensor>& dtensors,
                                          const std::vector<Placements>& placements,
                                          const RedistributeOptions& options = {});

// The same value on another mesh of the same World and device type, whose ranks may be others. Every rank of both
// meshes calls it; those of the tensor's mesh hold its pieces, and an empty tensor afterwards where they are not of the
// new one. Each rank receives the elements of its new piece that it does not hold, by one all_to_all over the ranks of
// both; a pending reduction is carried out before, into the layout that is reached soonest. Differentiable: the
// gradient goes back to the input's mesh, laid out as `grad_placements`; default, as the input, with Partial as
// Replicate.
// Throws std::invalid_argument on a mesh of another World or device type, and as redistribute.
at::Tensor redistribute_to(const at::Tensor& dtensor, const DeviceMesh& mesh, const Placements& placements,
                           const std::optional<Placements>& grad_placements = std::nullopt);

// The whole value as a plain tensor on every rank: redistribute to Replicate, then to_local.
at::Tensor full_tensor(const at::Tensor& dtensor, const std::optional<Placements>& grad_placements = std::nullopt);

// The DTensor of a plain tensor that every rank has in whole. Values are those of `src_rank` (a global rank; default
// the mesh's first), sent piece by piece: at most one scatter, over the mesh dimensions that cut it, and one broadcast,
// over the others. With kNoSource each rank keeps its part of its own tensor, without communication: the tensors must
// be equal. Differentiable: the gradient is the whole, plain one. A DTensor is returned as it is if it lies so already,
// else refused. Throws std::invalid_argument, before communicating, on an undefined tensor, a DTensor that lies
// otherwise (in place: any), a src_rank outside the mesh, and placements that do not fit. Shape and dtype must be the
// same on every rank; Checked alone compares them.
inline constexpr int64_t kMeshFirstRank = -1;
inline constexpr int64_t kNoSource = -2;
at::Tensor distribute_tensor(const at::Tensor& t, const DeviceMesh& mesh, const Placements& placements,
                             int64_t src_rank = kMeshFirstRank);

// Makes `plain` itself a DTensor: every handle to it (a module's member, an optimizer's parameter, a tied weight) is
// one at once. Values as in distribute_tensor. Keeps requires_grad and dtype; converts .grad alike. The piece moves to
// the mesh's device.
void distribute_in_place(const at::Tensor& plain, const DeviceMesh& mesh, const Placements& placements,
                         int64_t src_rank = kMeshFirstRank);

// "DTensor Float [4, 8] on {tp: 2} on cpu as [S(0)], here [2, 8]"
std::string to_string(const at::Tensor& dtensor);

// A DTensor seen as one: the functions above as members, and at::Tensor where one is wanted.
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
