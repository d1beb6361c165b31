#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/mesh/collectives/pending_collective.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Describes one collective of this rank: its kind, its mesh, and the mesh dimension, which is in [0, ndim).
struct CollectiveCall {
  const char* kind;
  DeviceMesh mesh;
  int64_t mesh_dim;
  WaitTime wait_time = WaitTime::kLater;
  mutable c10::intrusive_ptr<c10d::Backend> backend = {};  // set by the first group()

  const c10::intrusive_ptr<c10d::Backend>& group() const;
  int64_t n() const { return mesh.size(mesh_dim); }
  std::size_t here() const { return static_cast<std::size_t>(mesh.local_rank(mesh_dim)); }
  // Returns text for errors and logs; `op` is the operator that communicates, or "". An example is
  // "aten::mm: all_reduce on mesh dimension tp of {dp: 2, tp: 2} on cpu"
  std::string text(const char* op) const;
};

// Makes a call. Throws std::invalid_argument when this rank is outside the mesh or the mesh has no such dimension.
CollectiveCall begin_call(const char* kind, const DeviceMesh& mesh, const MeshDim& mesh_dim,
                          WaitTime wait_time = WaitTime::kLater);

// ---- arguments: these throw std::invalid_argument -----------------------------------------------------------------
void check_tensor(const CollectiveCall& call, const at::Tensor& tensor);
void check_rows(const CollectiveCall& call, const at::Tensor& input);
void check_source(const CollectiveCall& call, int64_t source);
// Returns the sum of the counts, one per rank, each at least 0.
int64_t check_counts(const CollectiveCall& call, const std::vector<int64_t>& counts);
// Refuses this rank's input or counts, which may be wrong on it alone: fails the job, unless the rank is alone there,
// and throws std::invalid_argument, "KIND: WHY".
[[noreturn]] void refuse_piece(const CollectiveCall& call, const std::string& why);
// Only the source sees a wrong input, and the other ranks would wait for it, so this check fails the job.
void check_scattered(const CollectiveCall& call, const at::Tensor& input, const at::Tensor& like);

// ---- running ------------------------------------------------------------------------------------------------------
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// Holds the works that a backend has started for one collective, and makes its result when they are done.
struct BackendWork {
  using Step = std::function<at::Tensor(at::Tensor)>;

  Works works;
  at::Tensor output = {};  // complete when all works are done
  at::Tensor input = {};   // keeps the input's memory until then
  Step rest = {};          // makes the result from the output; empty: the output is the result

  // Appends a step to `rest`.
  void then(Step next);
  // Returns the result. Call it once, when all works are done.
  at::Tensor result() { return rest ? rest(std::move(output)) : std::move(output); }
};

// Runs `start` on the call's group. A failure of `start` fails the job.
void start_on_group(const CollectiveCall& call, c10::function_ref<void(c10d::Backend&)> start);

}  // namespace tessera
