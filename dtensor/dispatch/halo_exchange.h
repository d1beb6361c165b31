#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/redistribute/region.h"
#include "tessera/dtensor/redistribute/transfer.h"
#include "tessera/ops/rules/halos.h"

namespace tessera {

// The rows that a rank computes from, where they are not those that it holds: made ready for this rank, kept with a
// decision.
class HaloExchange {
 public:
  // `fetched` are the layouts of the tensors that halos.inputs names, `computed` that of the one whose rows are
  // computed for.
  HaloExchange(const rules::Halos& halos, const std::vector<SpecPtr>& fetched, const Spec& computed);

  const rules::Halos& halos() const { return halos_; }
  // Whether some rank needs what it does not hold. The same on every rank.
  bool communicates() const { return communicates_; }

  // The rows that this rank needs of `pieces`, one for each fetched tensor, row-major or views of them. Where it
  // communicates, one all_to_all over the mesh dimensions that cut the windows, in which ranks without a piece take
  // part; each rank gets what it lacks.
  std::vector<at::Tensor> run(const DeviceMesh& mesh, std::span<const at::Tensor> pieces) const;

  // "rows of other ranks (dimension 2: 2 at most) by all_to_all over mesh dimensions 0".
  std::string to_string() const;

 private:
  rules::Halos halos_;
  std::vector<int64_t> mesh_dims_;  // that cut the windows
  std::vector<int64_t> most_;       // rows of each dimension that a rank gets
  bool communicates_ = false;
  std::vector<Transfer> transfers_;  // one for each tensor, where it communicates
  std::vector<Region> regions_;      // else what is needed of each piece
};

}  // namespace tessera
