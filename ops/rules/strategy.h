#pragma once

#include <string_view>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera::rules {

// What one mesh dimension may do: a placement for every input and every output. `kernel` names the local kernel that
// computes it when the operator itself, run on the pieces, would not (see dtensor/dispatch/local_kernel.h):
//   mean                      the sum of the piece, divided by the count of elements that the whole reduces into one
//   draw                      numbers that depend on an element's place in the whole (dtensor/random/draws.h)
//   extremum                  the operator, where a piece without elements gives the reduction's neutral element
//   parts                     of input 0, along a dimension: what of slice, split, select or unbind lies in this rank's
//                             piece
//   parts_backward            zeros but where such a part is
//   reshape                   input 0 with the local sizes of output 0
//   contiguous                the operator on dense pieces: kernels of LibTorch's that take them for such without a
//                             look
//   aligned_rows              the operator on matrices (inputs 0 and 1) whose rows begin at multiples of 16 bytes
//   contiguous_statistics     the operator, with what forward saved (mean, rstd, logsumexp) contiguous
//   attention_backward        the same, and zeros of a piece without elements
//   embedding                 rows that this rank lacks give zeros
//   embedding_dense_backward  the rows of the whole gradient that this rank holds (an output Shard(0), inputs whole)
//   convolution               the operator on rows with their halos, its count of groups that of the piece; of no
//                             channels zeros
//   convolution_backward      the same
//   pooling                   the operator on rows with their halos; counts and indices are those of the whole
//   group_norm                the operator, its counts of items, channels and groups those of the piece
//   mean_loss                 the operator with a sum in place of its mean, divided by the elements of the whole
//   nll_loss_mean             the local sum divided by the total weight of all ranks; the total weight, whole
struct Strategy {
  std::vector<Placement> inputs;
  std::vector<Placement> outputs;
  std::string_view kernel = {};
};

}  // namespace tessera::rules
