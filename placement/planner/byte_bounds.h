#pragma once

namespace tessera {

// Describes the source and the target layout of a redistribution by numbers of elements and of ranks.
struct Ends {
  double elements = 0;            // of the tensor
  double terms = 1;               // per element, in the source: the ranks over which it is pending
  double reduced = 1;             // of these, the ranks over which that reduction is no longer pending in the target
  double pieces_per_element = 1;  // in the target: the ranks over which an element is pending there
  double copies = 1;              // ranks that hold the same piece of an element in the target
  // Is an upper bound on the elements of a rank's target tile of which it has the value or a term, summed over all
  // ranks.
  double held = 0;
  double reachable = 0;     // the same, but the ranks along the mesh dimensions that become pending count as one
  bool new_copies = false;  // copies lie along a mesh dimension along which the source has no copies
};

// Returns a lower bound on the number of elements that all ranks together receive in any redistribution. Take an
// element that has T terms in the source and, in the target, K pieces of C copies each:
//   T = 1   Some piece depends on the value. A rank that needs it and does not have the value receives something.
//   K = 1   Adding the terms takes T - 1 messages, or T if no rank of the target has a term. Then each of the C copies
//           but the first receives the value.
//   else    A term that is never sent is known to its own ranks alone, so a piece that depends on it can be only where
//           these ranks are all the copies of that piece. There is no such piece where the target has copies along a
//           mesh dimension along which the source has none; otherwise there is at most one such term for each piece
//           whose ranks all have a term. All other terms are sent.
double least_received(const Ends& ends);

// Returns the same bound for plans, whose steps treat all terms of an element alike. After a reduction over n ranks an
// element with T terms has T / n, and the reduction moves at least T - T / n. An all_gather to C copies then moves C -
// 1 for each term that is left. A plan that reduces nothing leaves the terms where they are.
double least_received_by_steps(const Ends& ends);

}  // namespace tessera
