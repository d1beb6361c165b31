#pragma once

namespace tessera {

// Two layouts, in elements and ranks: what all ways from the one to the other have in common.
struct Ends {
  double elements = 0;   // of the tensor
  double terms = 1;      // of each element, in the source: the ranks over which it is pending
  double reduced = 1;    // of these, the ranks over which it is not to be pending so any more
  double slices = 1;     // pieces of each element, in the target: the ranks over which it is to be pending
  double copies = 1;     // ranks that are to have the same piece of an element
  double held = 0;       // summed over the ranks: elements of its target tile that it has, or has a term of; no fewer
  double reachable = 0;  // the same, summed over the groups of ranks along what becomes pending, each taken as one
  bool spreads = false;  // copies lie along a mesh dimension along which the source has none
};

// Elements that all ranks together receive at least, however it is done. For an element, which has T terms in the
// source and, in the target, K pieces of C copies each:
//   T = 1   some piece depends on the value; whoever is to have that piece and has not the value receives something.
//   K = 1   the terms meet in T - 1 messages, in T if no rank of the target has a term of it; then the value goes to
//           each of the C copies but the first.
//   else    a term that is never sent is known to its own ranks alone; so a piece that depends on it can be only where
//           these are all the copies of it. There is no such piece where the target has copies along a mesh dimension
//           along which the source has none; otherwise at most one term for each piece, of those pieces whose ranks all
//           have a term. All other terms are sent.
double least_received(const Ends& ends);

// The same of plans, whose steps keep each element's terms alike: of T terms an element keeps T / n after a reduction
// over n ranks, which moves T - T / n at least, and an all_gather to C copies moves C - 1 for each term that is left. A
// plan that reduces nothing leaves the terms where they are.
double least_received_by_steps(const Ends& ends);

}  // namespace tessera
