#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera {

// The operators that read contracts (ops/kernels/contract_kernels.cpp), by base name; "add" is add_ too. linear is
// matmul or addmm. Every other operator refuses a plain tensor that meets the parameter, unless the contract's input is
// Replicate.
inline constexpr std::array<std::string_view, 8> kContractOperators = {
    "matmul", "addmm", "embedding", "layer_norm", "rms_norm", "group_norm", "conv2d", "add"};

constexpr bool reads_contracts(std::string_view op) {
  for (const std::string_view known : kContractOperators) {
    if (known == op) return true;
  }
  return false;
}

// What a style leaves on a parameter: how the activation that meets it is laid out, and how the result is.
// Redistribution never changes a global value, so a contract can change only layouts.
//
// A contract speaks of ONE mesh dimension, `mesh_dim` of the parameter's mesh (the tensor dimension of
// parallelize_module):
//   - an activation that is a DTensor is brought into `desired` there and keeps its placement on every other mesh
//     dimension;
//   - an activation that is a plain tensor is this rank's piece: laid out as `input` on `mesh_dim`, Replicate on every
//     other mesh dimension. With any `data_dims` a plain activation is refused, by a message that names from_local:
//     nobody could know which part of the batch it is.
//   - the operator's first result is brought into `output` on `mesh_dim` and keeps its placement on every other one.
// Shard dimensions may be negative: they are counted in the tensor at hand. on_mesh_dim (below) does that arithmetic.
struct Contract {
  std::string path;                    // of the parameter, for errors and counts
  std::string style;                   // that left it, for errors
  std::vector<std::string> operators;  // among kContractOperators
  int64_t mesh_dim = 0;                // of the parameter's mesh
  std::vector<int64_t> data_dims;      // mesh dimensions that split the batch, never `mesh_dim`
  Placement input;
  Placement desired;
  std::optional<Placement> output;  // none: as the operator left it
  bool use_local_output = false;    // the result is a plain tensor, this rank's piece
  // Of a matmul: backward keeps the activation as it came, and brings it into `desired` once more.
  bool gather_input_again = false;
  // Of a chain's first contract: mesh dimensions that cut the parameter besides, to spare memory. Operators that use it
  // take it whole there (dtensor/dispatch/gather.h).
  std::vector<int64_t> gathered;
  // A tied weight's contract for other operators, such as "matmul" beside "embedding"; no operator is named twice.
  std::shared_ptr<const Contract> next;

  bool names(std::string_view op) const {
    for (const std::string& name : operators) {
      if (name == op) return true;
    }
    return false;
  }
  friend bool operator==(const Contract&, const Contract&) = default;
};
using ContractPtr = std::shared_ptr<const Contract>;

// The contract among `contract` and what it chains that names `op`, or nullptr.
inline const Contract* contract_for(const ContractPtr& contract, std::string_view op) {
  for (const Contract* c = contract.get(); c != nullptr; c = c->next.get()) {
    if (c->names(op)) return c;
  }
  return nullptr;
}

// The first contract of the chain by which a plain tensor that meets the parameter in `op` may be a piece, or nullptr.
// The one that names `op` decides; where none does, all are asked.
inline const Contract* piece_contract(const ContractPtr& contract, std::string_view op) {
  const Contract* const named = contract_for(contract, op);
  if (named != nullptr) return named->input.is_replicate() ? nullptr : named;
  for (const Contract* c = contract.get(); c != nullptr; c = c->next.get()) {
    if (!c->input.is_replicate()) return c;
  }
  return nullptr;
}

// `placements` of a tensor of `ndim` dimensions with `there`, its Shard dimension normalized, on `mesh_dim`.
//   ([S(0), R], 1, S(-1), 3) -> [S(0), S(2)]
// A Shard dimension outside the tensor is left as it is, for `normalize` to refuse.
inline Placements on_mesh_dim(Placements placements, int64_t mesh_dim, const Placement& there, int64_t ndim) {
  const bool from_end = there.is_shard() && there.tensor_dim() < 0;
  placements.at(static_cast<std::size_t>(mesh_dim)) = from_end ? there.on(there.tensor_dim() + ndim) : there;
  return placements;
}

}  // namespace tessera
