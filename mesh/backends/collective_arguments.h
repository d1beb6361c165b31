#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace tessera {

// Elements of a CPU tensor that one rank gives to another, or the place for what it takes: `count` of them from
// `offset` on, in row-major order; with `whole`, the tensor as it is.
struct Buffer {
  at::Tensor tensor;
  int64_t offset = 0;
  int64_t count = 0;
  bool whole = false;
};

Buffer whole_buffer(const at::Tensor& tensor);

// One rank's arguments to a collective whose ranks are threads of one process.
//
//   all_reduce, reduce, reduce_scatter  `op` is set; take (none or one) = give of rank 0 op give of rank 1 op ...
//   broadcast, scatter                  `root` alone gives; everyone takes one buffer
//   all_gather, gather, all_to_all      takes none, or one buffer of each rank
//
// Who gives has one buffer for all, or one for each rank of the group.
struct CollectiveArguments {
  const char* kind = "";
  std::optional<c10d::ReduceOp::RedOpType> op;
  int64_t root = -1;  // place in the group
  std::vector<Buffer> give;
  std::vector<Buffer> take;
  std::string fault;  // what is wrong with this rank's own arguments, if anything
};

// "all_reduce sum of Float (2, 3)", "all_to_all, gives Byte x [3, 0], takes Byte x [1, 1]"
std::string to_string(const CollectiveArguments& arguments);

// Why a give does not fit into a take, or nothing: "3 elements of Float into 4 of Float".
std::string misfit(const Buffer& give, const Buffer& take);
// Copies what fits.
void copy_buffer(const Buffer& give, const Buffer& take);

// Why the arguments of a group's ranks do not make a collective, and what each rank gave; empty when they do. `ranks`
// are the global ones, for the text.
std::string mismatch(const std::vector<CollectiveArguments>& arguments, const std::vector<int64_t>& ranks);

// Carries out a collective without mismatch(): reads every give, writes every take. Reductions go in the order of
// ranks. Throws what ATen throws on a dtype for which it has no such reduction, and std::invalid_argument on avg of
// integers.
void carry_out(const std::vector<CollectiveArguments>& arguments);

}  // namespace tessera
