#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera::rules {

// Gives the placements of every input and every output on one mesh dimension. A Shard(dim) stands for every partition
// of that dimension, alike in all of the strategy's Shards: the pieces may hold other rows than torch.chunk's, and a
// kernel that must know which reads their Spec::tile. A Shard with a partition of its own stands for that alone.
// `kernel` names the local kernel to run on the pieces where the operator itself would not give the piece of the result
// (see dtensor/dispatch/local_kernel.h). These kernels compute:
//   mean                      the sum of the piece, divided by the number of elements that are reduced to one globally
//   draw                      random numbers by an element's position in the global tensor (dtensor/random/draws.h)
//   extremum                  the operator; a piece without elements gives the reduction's neutral element
//   extremum_index            the extrema of all pieces of the reduced dimensions, and their global indices
//   topk                      the greatest or smallest elements of all pieces, and their global indices
//   deviation                 var, std and pairs with the mean, from pieces of the reduced dimensions
//   parts                     of input 0: what slice, split, select or unbind along a dimension takes from this piece
//   parts_backward            zeros, except where such a part is
//   diagonal                  of input 0: what the diagonal of two dimensions takes from this piece
//   diagonal_backward         zeros, except where such a part is
//   triangle                  tril or triu of this piece, with the diagonal where the piece has it
//   reshape                   input 0 with the local sizes of output 0
//   contiguous                the operator on contiguous pieces, for LibTorch kernels that assume them without a check
//   aligned_rows              the operator on matrices (inputs 0 and 1) whose rows begin at multiples of 16 bytes
//   contiguous_statistics     the operator, with what forward saved (mean, rstd, logsumexp) made contiguous
//   attention_backward        likewise; zeros for a piece without elements
//   elements                  of input 0: what an index reads; zeros for elements that other ranks have
//   elements_added            adds what falls on this piece of input 0
//   elements_written          writes what falls on this piece of input 0
//   embedding                 the lookup; rows that this rank does not hold give zeros
//   embedding_dense_backward  the rows of the whole gradient that this rank holds (an output Shard(0), inputs whole)
//   convolution               the operator on fetched rows, with the piece's group count; zeros if it has no channels
//   convolution_backward      likewise
//   pooling                   the operator on fetched rows, with global counts and indices
//   group_norm                the operator, with the piece's numbers of items, channels and groups
//   layer_norm                the operator, with the means and variances of lines of which each rank has a piece
//   layer_norm_backward       likewise, with two sums over each line
//   softmax                   softmax or its logarithm, with the greatest elements and the sums of all pieces' lines
//   softmax_backward          likewise, with the sums
//   logsumexp                 the operator over all pieces
//   nll_loss                  of a mean: the local sum divided by the total weight of all ranks, and that total weight
//   nll_loss_of_classes       the losses of elements whose class this rank has; also as a part of the former
//   nll_loss_backward         the gradient of pieces of the classes
struct Strategy {
  // Says what a kernel that communicates does on the mesh dimension for which the strategy is chosen: all_reduces of
  // together `reduced` bytes, and all_gathers of together `gathered` bytes of each rank, as much as they were if no
  // other mesh dimension cut anything. If both are 0 it communicates nothing there.
  struct Joined {
    double reduced = 0;
    double gathered = 0;
    bool communicates() const { return reduced > 0 || gathered > 0; }
  };

  std::vector<Placement> inputs;
  std::vector<Placement> outputs;
  std::string_view kernel = {};
  std::optional<Joined> joined = {};  // nullopt: this is not known, and costs nothing
};

}  // namespace tessera::rules
