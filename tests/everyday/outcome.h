#pragma once

#include <exception>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

// The outcome of a call in one process or on ranks, and the comparison of two.
namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

struct Outcome {
  Tensors results;
  Tensors grads;
  std::string collectives;  // only where a test counts them
};

// Returns the whole value of a DTensor; any other tensor, also an undefined one, is returned as it is.
at::Tensor whole_of(const at::Tensor& t);

// Returns a weighted sum of the differentiable results; undefined where there are none.
at::Tensor loss_of(const Tensors& results);

// Returns what differs between `mine` and `plain`; "" for nothing. A missing gradient counts as zero.
std::string compare(const Outcome& mine, const Outcome& plain);

// Returns the text of the innermost error.
std::string message(const std::exception& error);

}  // namespace tessera::testing
