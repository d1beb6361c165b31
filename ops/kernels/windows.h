#pragma once

#include <string_view>
#include <vector>

#include "tessera/dtensor/dispatch/local_kernel.h"

// What the kernels of convolution and pooling share.
namespace tessera {

// Along one dimension, which rows of the wide and the narrow side this rank's part of a call is about, and what the
// windows of the narrow ones span, beyond the edges too. The rows that are computed are those that it holds of them,
// the others were fetched.
struct WindowRows {
  int64_t dim;
  const rules::Window& window;
  Interval wide;
  Interval narrow;
  Interval span;
  bool whole;  // all of both sides
};

// One a dimension of call.fetched->halos; none where nothing was fetched.
std::vector<WindowRows> window_rows(const LocalCall& call);

// Whether a side is without rows in one of the dimensions.
bool no_rows(const std::vector<WindowRows>& rows);

// `t`, whose rows in each dimension of `rows` are member `from` of it, with those that `to` says: rows that it lacks
// are `value`.
at::Tensor reframed(const at::Tensor& t, const std::vector<WindowRows>& rows, Interval WindowRows::*from,
                    Interval WindowRows::*to, const at::Scalar& value = 0);

// An argument of the call by its name.
at::IValue& named(const LocalCall& call, torch::jit::Stack& stack, std::string_view name);

}  // namespace tessera
