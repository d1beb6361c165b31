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

class GatherSchedule;

// Lists the operators that apply contracts (ops/kernels/contract_kernels.cpp), by base name: "add" includes add_, and
// linear calls matmul or addmm. Every other operator refuses a plain tensor beside the parameter, unless the contract's
// input is Replicate.
inline constexpr std::array<std::string_view, 8> kContractOperators = {
    "matmul", "addmm", "embedding", "layer_norm", "rms_norm", "group_norm", "conv2d", "add"};

constexpr bool reads_contracts(std::string_view op) {
  for (const std::string_view known : kContractOperators) {
    if (known == op) return true;
  }
  return false;
}

// Says how the activation that a parameter is used with is laid out, and how the result is. A style attaches it to the
// parameter. Redistribution never changes a global value, so a contract can change only layouts.
//
// A contract applies to ONE mesh dimension, `mesh_dim` of the parameter's mesh (the tensor-parallel dimension given to
// parallelize_module):
//   - An activation that is a DTensor is redistributed to `desired` there, and keeps its placement on every other mesh
//     dimension. A cut that cannot be made beside `desired`, or `output` below, is replaced (fitted_around in
//     placement/layout.h).
//   - An activation that is a plain tensor is this rank's piece: laid out as `input` on `mesh_dim`, Replicate on every
//     other mesh dimension. With any `data_dims` a plain activation is refused, since its part of the batch is unknown;
//     the error names from_local. Under InferenceMode it is each rank's own.
//   - The operator's first result is redistributed to `output` on `mesh_dim`, and keeps its placement on every other
//     one.
// A negative Shard dimension counts from the end of the tensor's dimensions; on_mesh_dim (below) normalizes it.
struct Contract {
  std::string path;                    // the parameter's path, for errors and counts
  std::string style;                   // the style that attached it, for errors
  std::vector<std::string> operators;  // each is one of kContractOperators
  int64_t mesh_dim = 0;                // on the parameter's mesh
  std::vector<int64_t> data_dims;      // mesh dimensions of several ranks that split the batch
  Placement input;
  Placement desired;
  std::optional<Placement> output;  // nullopt: the result keeps the operator's layout
  bool use_local_output = false;    // the result is a plain tensor, this rank's piece
  // For matmul: autograd saves the activation as it was given, and backward redistributes it to `desired` again.
  bool gather_input_again = false;
  // Lists the mesh dimensions that also cut the parameter, to save memory: all data dimensions of a parallelize_module
  // with data_placement Shard(0), else none. Only the first contract of a chain has them. Operators that use the
  // parameter gather it there first (dtensor/dispatch/gather.h).
  std::vector<int64_t> gather_dims;
  // true: it belongs to values that were computed from parameters. It has path and gather_dims alone.
  bool derived = false;
  // Gathers the parameter, ahead of its use where it can; nullptr: it is gathered when it is used.
  std::shared_ptr<GatherSchedule> gather_schedule;
  // Is this contract for copies of the parameter, without the schedule, which does not know them and holds the pieces
  // of all parameters; nullptr: this one.
  std::shared_ptr<const Contract> of_copies;
  // Holds the contract of a tied weight for other operators, such as "matmul" beside "embedding". A chain names no
  // operator twice.
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

// Returns the contract of a view of a parameter, or else of a copy of it.
inline const ContractPtr& inherited(const ContractPtr& contract, bool is_view) {
  return is_view || contract == nullptr || contract->of_copies == nullptr ? contract : contract->of_copies;
}

// Returns the contract in the chain of `contract` that names `op`, or nullptr.
inline const Contract* contract_for(const ContractPtr& contract, std::string_view op) {
  for (const Contract* c = contract.get(); c != nullptr; c = c->next.get()) {
    if (c->names(op)) return c;
  }
  return nullptr;
}

// Returns the first contract in the chain that takes a plain tensor beside the parameter in `op` as a piece, or
// nullptr. The contract that names `op` decides; if none does, the first one whose input is not Replicate is returned.
inline const Contract* piece_contract(const ContractPtr& contract, std::string_view op) {
  const Contract* const named = contract_for(contract, op);
  if (named != nullptr) return named->input.is_replicate() ? nullptr : named;
  for (const Contract* c = contract.get(); c != nullptr; c = c->next.get()) {
    if (!c->input.is_replicate()) return c;
  }
  return nullptr;
}

// Returns `placements` of a tensor of `ndim` dimensions, with `there` on `mesh_dim`; a negative Shard dimension is
// normalized.
//   ([S(0), R], 1, S(-1), 3) -> [S(0), S(2)]
// A Shard dimension outside the tensor is left as it is; `normalize` refuses it.
inline Placements on_mesh_dim(Placements placements, int64_t mesh_dim, const Placement& there, int64_t ndim) {
  const bool from_end = there.is_shard() && there.tensor_dim() < 0;
  placements.at(static_cast<std::size_t>(mesh_dim)) = from_end ? there.on(there.tensor_dim() + ndim) : there;
  return placements;
}

}  // namespace tessera
