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

// Returns the sum over `dims`, with keepdim, of what `sum_of_rows` returns for the rows of dimension 0 from `begin` to
// `end`: their sum over `dims`, with keepdim. On the CPU it is asked for parts of `t` that stay in the cache, so that
// what it computes for them is not as large as `t`; on a GPU for all rows at once.
at::Tensor sum_of_parts(const at::Tensor& t, const std::vector<int64_t>& dims,
                        c10::function_ref<at::Tensor(int64_t begin, int64_t end)> sum_of_rows);

}  // namespace tessera
