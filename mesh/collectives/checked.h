#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/core/reduce_op.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// While one lives, ranks compare what they are about to do before they do it: for finding why a job hangs or computes
// nonsense.
//
//   Checked checked(mesh);  // or TESSERA_CHECKED=1 for the whole run
//
// Before each collective the ranks of its group exchange a 64-bit hash of operator, kind, reduction, source, shape,
// dtype, mesh dimension, step of the redistribution, and the number of the collective on the group; for all_to_all the
// splits too. Where they differ every rank of the group throws MismatchError, with what each rank was about to do,
// before anything has moved; the job can go on. Plain tensors that an operator or from_local takes as the same on every
// rank are compared by a hash of their values.
//
// It holds for the World, on every mesh of it: all ranks make and end it at the same place. Checks cost a small
// all-gather each and are not recorded: CommCounter counts what it counts without. A fake world checks nothing, and a
// collective of empty tensors, which communicates nothing, is not compared.
class Checked {
 public:
  explicit Checked(const DeviceMesh& mesh, bool enabled = true);
  explicit Checked(World& world, bool enabled = true);
  ~Checked();
  Checked(const Checked&) = delete;
  Checked& operator=(const Checked&) = delete;

  // Whether what this World does now is checked.
  static bool enabled(World& world);

 private:
  World& world_;
  bool previous_;
};

// ---- for the collectives ------------------------------------------------------------------------------------------
// A collective as this rank is about to issue it.
struct Intent {
  const at::Tensor* tensor = nullptr;  // that gives shape and dtype; null for a barrier
  std::optional<ReduceOp> op;
  int64_t source = -1;
  const std::vector<int64_t>* send = nullptr;  // all_to_all
  const std::vector<int64_t>* receive = nullptr;
  const std::vector<int64_t>* counts = nullptr;  // of uneven pieces, the same on every rank
};

// Brings every rank's row, [*] -> [n, *], in the same order to all of them, on the CPU.
using GatherRows = std::function<at::Tensor(const at::Tensor& row)>;

// Throws MismatchError on every rank unless `text` is the same on all: "HEADLINE: ranks [0, 2]: TEXT; ranks [1]: ..."
void check_alike(const std::string& headline, const std::string& text, int64_t rank, const GatherRows& gather);

void check_collective(const char* kind, const DeviceMesh& mesh, int64_t mesh_dim, const Intent& intent,
                      const GatherRows& gather);

}  // namespace tessera
