#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/mesh/core/reduce_op.h"
#include "tessera/mesh/device_mesh.h"

// Helpers for local kernels of reductions, of which some join what ranks find in their pieces.
namespace tessera {

// Returns the dimensions that an argument of one or several names, counted from the front of a tensor of `ndim`; all of
// them if it names none.
std::vector<int64_t> reduced_dims(const at::IValue& dim, int64_t ndim);
// Returns the number of elements of a tensor of `sizes` that are reduced to one.
int64_t reduced_count(const std::vector<int64_t>& sizes, const std::vector<int64_t>& dims);

// Returns the mesh dimensions that cut one of `dims`, merged into one, along which ranks join what they find.
DeviceMesh joining_mesh(const Spec& spec, const std::vector<int64_t>& dims);
// Returns `mine` of these ranks, reduced by one all_reduce.
at::Tensor joined(const at::Tensor& mine, const Spec& spec, const std::vector<int64_t>& dims, ReduceOp op);

// Is a range of one dimension.
struct Part {
  int64_t dim, begin, end;

  // Returns this part of a tensor; all of one that has size 1 there, and is broadcast.
  at::Tensor of(const at::Tensor& t) const { return t.size(dim) == 1 ? t : t.slice(dim, begin, end); }
};
// Returns the sum over `dims`, with keepdim, where `sum_of` returns it for a part of `t`. On the CPU it is asked for
// parts of about 1 MiB, which stay in the cache, so that what it computes for them is not as large as `t`; on a GPU for
// all at once. `t` has a dimension.
at::Tensor sum_of_parts(const at::Tensor& t, const std::vector<int64_t>& dims,
                        c10::function_ref<at::Tensor(const Part& part)> sum_of);

// Holds, of each of L lines, the mean (K = 1 number, or 2 of a complex one) and the sum of squared distances from it;
// and how many elements a line has. All are float64, whose rounding does not show where elements have fewer bits.
struct Moments {
  at::Tensor mean;     // [L, K]
  at::Tensor squares;  // [L]
  at::Tensor count;    // [1]
};
// Returns the moments of lines that are reduced over `dims`, of all pieces. Runs one all_gather of these, of 8 bytes
// for each of L (K + 1) + 1 numbers.
Moments moments_of_all(const at::Tensor& piece, const Spec& spec, const std::vector<int64_t>& dims);

}  // namespace tessera
