#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/contract.h"

// This file adds biases to plain results: those of styles with use_local_output, whose bias is a parameter with a
// contract of its own.
namespace tessera::detail {

// Notes that `local`, this rank's piece of `result`, is the last plain result that a contract has returned on this
// thread.
void note_local_result(const at::Tensor& local, const at::Tensor& result);

// Returns the contract of `other` if it is a bias and `self` is a plain result, else nullptr.
const Contract* bias_contract(const at::Tensor& self, const at::Tensor& other);

// Returns the piece of `bias` that fits the plain `result`, which is laid out as the contract's output. Where the
// result is cut along another dimension than the bias's, every rank adds the whole bias to its part, and the bias's
// gradient is a sum over ranks. Throws std::invalid_argument where nobody knows over which: on a mesh of several
// dimensions, where `result` is not the last plain result as it was returned. May gather the bias along the contract's
// mesh dimension.
at::Tensor bias_of_local(const at::Tensor& bias, const Contract& contract, const at::Tensor& result);

}  // namespace tessera::detail
