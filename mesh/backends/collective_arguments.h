#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace tessera {

// Describes elements of a tensor that one rank gives to another, or the memory for those that it takes: `count`
// elements from `offset` on, in row-major order. With `whole` they are the whole tensor, and its shape counts too.
struct Buffer {
  at::Tensor tensor;
  int64_t offset = 0;
  int64_t count = 0;
  bool whole = false;
};

Buffer whole_buffer(const at::Tensor& tensor);

// Holds one rank's arguments to a collective whose ranks are threads of one process.
//
//   all_reduce, reduce, reduce_scatter  `op` is set; a rank takes none, or gets give of rank 0 op give of rank 1 op ...
//   broadcast, scatter                  only `root` gives; every rank takes one buffer
//   all_gather, gather, all_to_all      a rank takes none, or one buffer from each rank
//
// A rank that gives has one buffer for all ranks, or one for each rank of the group.
struct CollectiveArguments {
  const char* kind = "";
  std::optional<c10d::ReduceOp::RedOpType> op;
  int64_t root = -1;  // position in the group
  std::vector<Buffer> give;
  std::vector<Buffer> take;
  std::string fault;  // what is wrong with this rank's own arguments, or empty
};

// Returns text such as "all_reduce sum of Float (2, 3)" or "all_to_all, gives Byte x [3, 0], takes Byte x [1, 1]".
std::string to_string(const CollectiveArguments& arguments);

// Returns why `give` does not fit into `take`, such as "3 elements of Float but 4 of Float are expected", or "" if it
// fits.
std::string misfit(const Buffer& give, const Buffer& take);
// Copies `give` to `take`, which must fit.
void copy_buffer(const Buffer& give, const Buffer& take);

// Returns why the arguments of a group's ranks do not make a collective, and each rank's arguments; empty if they do.
// `ranks` are the global ranks, for the text.
std::string mismatch(const std::vector<CollectiveArguments>& arguments, const std::vector<int64_t>& ranks);

// Executes a collective for which mismatch() is empty: reads every give and writes every take. Reductions are in the
// order of ranks. Throws what ATen throws on a dtype for which it has no such reduction, and std::invalid_argument on
// avg of integers.
void carry_out(const std::vector<CollectiveArguments>& arguments);

}  // namespace tessera
