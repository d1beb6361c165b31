#pragma once

#include <string_view>
#include <vector>

#include "tessera/dtensor/dispatch/local_kernel.h"

// Helpers for the kernels of convolution and pooling.
namespace tessera {

// Describes, along one dimension, the rows of the wide and of the narrow side that this rank's part of a call uses, and
// the span of the narrow rows' windows, padding included. One side has the rows that this rank holds and computes; rows
// of the other side were fetched.
struct WindowRows {
  int64_t dim;
  const rules::Window& window;
  Interval wide;
  Interval narrow;
  Interval span;
  bool whole;  // these are all rows of both sides
};

// Returns one entry per dimension of call.fetched->halos, or none if nothing was fetched.
std::vector<WindowRows> window_rows(const LocalCall& call);

// Returns whether a side has no rows in one of the dimensions.
bool no_rows(const std::vector<WindowRows>& rows);

// Returns `t` cut or padded in each dimension of `rows`: from the rows of member `from`, which it has, to those of
// member `to`. New rows are filled with `value`.
at::Tensor reframed(const at::Tensor& t, const std::vector<WindowRows>& rows, Interval WindowRows::*from,
                    Interval WindowRows::*to, const at::Scalar& value = 0);

// Returns the call's argument `name`.
at::IValue& named(const LocalCall& call, torch::jit::Stack& stack, std::string_view name);

}  // namespace tessera
