#pragma once

#include <string>
#include <vector>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Every overload of ATen's that takes a tensor, "aten::add.Tensor", in alphabetical order.
std::vector<std::string> tensor_overloads();

// Why it is out of scope: its tensors are of another kind (sparse, quantized, nested), or another device's; ""
// otherwise.
std::string out_of_scope(const std::string& overload);

// Calls of an overload that plain tensors allow: the samples by hand, where it or its functional twin has some; else
// one with arguments made from the schema. Empty where none was found.
std::vector<Sample> calls_of(const std::string& overload);

// Why no call of it is made although its tensors are of the right kind; "" where no reason is known.
std::string why_not_called(const std::string& overload);

}  // namespace tessera::testing
