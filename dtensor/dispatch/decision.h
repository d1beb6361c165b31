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

// What to do for a call, as far as it follows from layouts, shapes and options: found once, then cached. The same on
// every rank but for sizes of pieces.
struct Decision {
  struct Move {
    std::size_t tensor;  // index in Call::tensors
    SpecPtr to;
    RoutePtr route;
  };
  // A schema argument that holds sizes or strides, of this rank's piece.
  struct LocalArg {
    std::size_t arg;
    std::vector<int64_t> ints;
  };
  // Rows of other ranks' pieces, for the kernel.
  struct Halos {
    std::vector<std::size_t> tensors;  // indexes in Call::tensors
    HaloExchange exchange;
  };
  SpecPtr mesh_spec;                   // any tensor's: keeps the call's mesh
  std::vector<Move> moves;             // inputs to bring elsewhere
  std::shared_ptr<const Halos> halos;  // fetched when inputs are where they are to be; nullptr: none
  std::vector<SpecPtr> inputs;         // layout of each tensor when the local operator runs; nullptr: plain or absent
  std::vector<SpecPtr> outputs;        // of each tensor result, flattened; nullptr: undefined
  bool outputs_from_local = false;     // replicated results whose shapes are those that the local call gives
  bool make_dense = false;             // results' strides were not known beforehand: dense, in the order of their specs
  std::vector<LocalArg> local_args;    // that the local call gets instead
  LocalKernel kernel = nullptr;
  bool by_rule = false;       // else every input was brought to Replicate, for want of a rule that fits
  bool moved = false;         // some input is another tensor than the caller's
  bool communicates = false;  // moves, halos or a kernel that communicate
  bool ranks_differ = false;  // some tensor is not replicated: an error in the local call may be this rank's alone
  bool write_back = false;  // written arguments are computed aside in `inputs`' layout and brought back into their own
  bool nothing_here = false;  // every result's piece is empty on this rank: do not run the operator
  bool direct = false;        // the operator itself, on the pieces that are there; nothing before it, nothing after it
};
using DecisionPtr = std::shared_ptr<const Decision>;

// Decides by the operator's rule, or, without one, to replicate. Throws what the operator throws on global shapes, and
// std::invalid_argument for what cannot be; before any communication, alike on every rank. `considered` takes what the
// choice was made from.
DecisionPtr decide(const Call& call, std::vector<rules::Considered>* considered = nullptr);

}  // namespace tessera::dispatch
