#pragma once

#include <exception>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

// What a call gave, in one process or on ranks, and whether both gave the same.
namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

struct Outcome {
  Tensors results;
  Tensors grads;
  std::string collectives;  // where a test counts them
};

// The whole value of a DTensor; another tensor, or none, as it is.
at::Tensor whole_of(const at::Tensor& t);

// Differentiable results weighed and added up; undefined where there are none.
at::Tensor loss_of(const Tensors& results);

// What of `mine` differs from `plain`; "" for nothing. A gradient that is not
// there is zero.
std::string compare(const Outcome& mine, const Outcome& plain);

// The text of the innermost error.
std::string message(const std::exception& error);

}  // namespace tessera::testing
