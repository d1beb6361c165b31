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

// Fetches the rows of other ranks' pieces that this rank's windows reach into. It is prepared for this rank, and kept
// with a decision.
class HaloExchange {
 public:
  // `fetched` are the layouts of the tensors that halos.inputs names; `computed` is the layout of the tensor whose rows
  // are computed.
  HaloExchange(const rules::Halos& halos, const std::vector<SpecPtr>& fetched, const Spec& computed);

  const rules::Halos& halos() const { return halos_; }
  // Says whether some rank needs rows that it does not hold; the same on every rank.
  bool communicates() const { return communicates_; }

  // Returns the rows that this rank needs of `pieces`, one tensor per fetched tensor: row-major, or a view of the
  // piece. If it communicates, runs one all_to_all over the mesh dimensions that cut the windows, in which ranks
  // without a piece take part too; each rank receives the rows that it does not hold.
  std::vector<at::Tensor> run(const DeviceMesh& mesh, std::span<const at::Tensor> pieces) const;

  // Returns "rows of other ranks (dimension 2: 2 at most) by all_to_all over mesh dimensions 0".
  std::string to_string() const;

 private:
  rules::Halos halos_;
  std::vector<int64_t> mesh_dims_;  // the mesh dimensions that cut the windows
  std::vector<int64_t> most_;       // the most rows that a rank receives, per dimension
  bool communicates_ = false;
  std::vector<Transfer> transfers_;  // if it communicates: one per tensor
  std::vector<Region> regions_;      // else: the part needed of each piece
};

}  // namespace tessera
