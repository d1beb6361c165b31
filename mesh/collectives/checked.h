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

// While a Checked lives, the ranks compare each collective before they execute it. Use it to find out why a job hangs
// or gives wrong numbers.
//
//   Checked checked(mesh);  // or TESSERA_CHECKED=1 for the whole run
//
// Before each collective the ranks of its group exchange a 64-bit hash of operator, path, kind, reduction, source,
// shape, dtype, mesh dimension, step of the redistribution, and the number of the collective on the group, counted from
// 1 while Checked is on; for all_to_all also the splits. If they differ, every rank of the group throws MismatchError,
// whose text lists each rank's collective. No data has been sent then, and the job can go on. Plain tensors that an
// operator or from_local treats as equal on every rank are compared by a hash of their values; in backward, also in
// hooks that run there, they are not.
//
// It applies to the whole World, on every mesh of it: all ranks must make and destroy it at the same point. Each check
// costs a small all-gather, which CommCounter does not count. A fake world checks nothing, nor are collectives compared
// that communicate nothing because their tensors are empty.
class Checked {
 public:
  explicit Checked(const DeviceMesh& mesh, bool enabled = true);
  explicit Checked(World& world, bool enabled = true);
  ~Checked();
  Checked(const Checked&) = delete;
  Checked& operator=(const Checked&) = delete;

  // Returns whether this World's next collective is checked.
  static bool enabled(World& world);

 private:
  World& world_;
  bool previous_;
};

// ---- for the collectives ------------------------------------------------------------------------------------------
// Holds the arguments of a collective that this rank is about to start.
struct Intent {
  const at::Tensor* tensor = nullptr;  // gives shape and dtype; null for a barrier
  std::optional<ReduceOp> op;
  int64_t source = -1;
  const std::vector<int64_t>* send = nullptr;  // of all_to_all
  const std::vector<int64_t>* receive = nullptr;
  const std::vector<int64_t>* counts = nullptr;  // of uneven pieces; the same on every rank
};

// All-gathers the ranks' rows, [*] -> [n, *], in the same order on every rank; the result is on the CPU.
using GatherRows = std::function<at::Tensor(const at::Tensor& row)>;

// Compares `text` over the ranks of `gather`. If it differs, throws MismatchError on every rank: "HEADLINE: ranks [0,
// 2]: TEXT; ranks [1]: ...".
void check_alike(const std::string& headline, const std::string& text, int64_t rank, const GatherRows& gather);

// Compares a collective over the ranks of its mesh dimension, as Checked describes.
void check_collective(const char* kind, const DeviceMesh& mesh, int64_t mesh_dim, const Intent& intent,
                      const GatherRows& gather);

}  // namespace tessera
