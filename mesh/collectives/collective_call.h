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

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// One collective: who calls what where. mesh_dim is in [0, ndim).
struct CollectiveCall {
  const char* kind;
  DeviceMesh mesh;
  int64_t mesh_dim;
  mutable c10::intrusive_ptr<c10d::Backend> backend = {};  // once it has been asked for

  const c10::intrusive_ptr<c10d::Backend>& group() const;
  int64_t n() const { return mesh.size(mesh_dim); }
  std::size_t here() const { return static_cast<std::size_t>(mesh.local_rank(mesh_dim)); }
  // For errors and logs, `op` being the operator that communicates or "":
  // "aten::mm: all_reduce on mesh dimension tp of {dp: 2, tp: 2} on cpu"
  std::string text(const char* op) const;
};

// Throws std::invalid_argument when this rank is outside the mesh, or the mesh dimension is not there.
CollectiveCall begin_call(const char* kind, const DeviceMesh& mesh, int64_t mesh_dim);

// ---- arguments: these throw std::invalid_argument -----------------------------------------------------------------
void check_tensor(const CollectiveCall& call, const at::Tensor& tensor);
void check_rows(const CollectiveCall& call, const at::Tensor& input);
void check_source(const CollectiveCall& call, int64_t source);
// Returns the sum of one count a rank, each of at least 0.
int64_t check_counts(const CollectiveCall& call, const std::vector<int64_t>& counts);
// Only the source sees a wrong input: the others would wait for it, so the job is failed.
void check_scattered(const CollectiveCall& call, const at::Tensor& input, const at::Tensor& like);

// ---- running ------------------------------------------------------------------------------------------------------
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// What a backend has started for one collective, and how its result is made once that is done.
struct BackendWork {
  using Step = std::function<at::Tensor(at::Tensor)>;

  Works works;
  at::Tensor output = {};  // filled once all works are done
  at::Tensor input = {};   // kept until then
  Step rest = {};          // what makes the result of the output; empty: the output is it

  // Adds to the rest.
  void then(Step next);
  // Once, when all works are done.
  at::Tensor result() { return rest ? rest(std::move(output)) : std::move(output); }
};

// Runs `start` on the call's group. A failure there becomes the job's.
void start_on_group(const CollectiveCall& call, c10::function_ref<void(c10d::Backend&)> start);

}  // namespace tessera
