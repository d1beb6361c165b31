#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/dtensor/dispatch/halo_exchange.h"
#include "tessera/dtensor/dispatch/key.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/ops/rules/search.h"

namespace tessera::dispatch {

// Says how to run a call, as far as that follows from layouts, shapes and options. It is made once, then cached. It is
// the same on every rank except for the sizes of pieces.
struct Decision {
  struct Move {
    std::size_t tensor;  // index in Call::tensors
    SpecPtr from;        // kept alive: a later tensor of this layout then has the same Spec, and finds the decision
    SpecPtr to;
    RoutePtr route;
  };
  // Replaces a schema argument that holds sizes or strides by the values for this rank's piece.
  struct LocalArg {
    std::size_t arg;
    std::vector<int64_t> ints;
  };
  // Fetches the rows of other ranks' pieces that the kernel needs.
  struct Halos {
    std::vector<std::size_t> tensors;  // indexes in Call::tensors
    HaloExchange exchange;
  };
  SpecPtr first_spec;                  // the Spec of the first DTensor, as Call::first_spec; it owns the call's mesh
  std::vector<Move> moves;             // the inputs to redistribute
  std::shared_ptr<const Halos> halos;  // fetched once the inputs are redistributed; nullptr: none
  std::vector<SpecPtr> inputs;         // each tensor's layout when the local operator runs; nullptr: plain or absent
  std::vector<SpecPtr> outputs;        // each tensor result's layout, lists flattened; nullptr: undefined
  std::vector<int64_t> offsets;        // views: each result's MetaResult::offset; empty: all are 0
  bool outputs_from_local = false;     // results are replicated, with the shapes that the local call returns
  bool make_dense = false;             // results are made dense, in their specs' memory order
  std::vector<LocalArg> local_args;    // arguments that the local call gets instead
  LocalKernel kernel = nullptr;
  LocalKernel check = nullptr;  // runs before the kernel, on every rank of the mesh
  bool by_rule = false;         // false: no rule fits, and every input is redistributed to Replicate
  bool moved = false;           // some input is another tensor than the caller's piece
  bool communicates = false;    // moves, halos or the kernel communicate
  bool joins = false;           // the kernel communicates
  bool ranks_differ = false;    // some tensor is not replicated: an error may occur on this rank alone
  bool write_back = false;      // written arguments are computed in copies laid out as `inputs`, and copied back
  bool nothing_here = false;    // every result's piece is empty on this rank, and no kernel communicates: nothing runs
  // Only the operator runs: no redistribution, halo or copy, and no kernel, or one that is needed only where a piece is
  // not contiguous (LocalKernelTraits::makes_contiguous).
  bool operator_alone = false;

  int64_t offset(std::size_t output) const { return offsets.empty() ? 0 : offsets[output]; }
};
using DecisionPtr = std::shared_ptr<const Decision>;

// Returns, for each argument that is written in a copy, the layout of the copy and that of the argument, to which the
// result is copied back.
std::vector<std::pair<SpecPtr, SpecPtr>> moves_back(const Call& call, const Decision& decision);

// Decides by the operator's rule or, without one that fits, to replicate. Throws what the operator throws on the global
// shapes, and std::invalid_argument for an unsupported call: before any communication, alike on every rank.
// `considered` gets the strategies that the choice was made from.
DecisionPtr decide(const Call& call, std::vector<rules::Considered>* considered = nullptr);

}  // namespace tessera::dispatch
