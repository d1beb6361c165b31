#pragma once

#include <string>
#include <vector>

#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Returns every overload of ATen that takes a tensor, such as "aten::add.Tensor", in alphabetical order.
std::vector<std::string> tensor_overloads();

// Returns why an overload is out of scope: its tensors are of another kind (sparse, quantized, nested) or on another
// device. Returns "" if it is in scope.
std::string out_of_scope(const std::string& overload);

// Returns calls of an overload that plain tensors allow: the handwritten samples, if it or its functional twin has
// some, or else one call with arguments made from the schema. Returns none if none was found.
std::vector<Sample> calls_of(const std::string& overload);

// Returns why no call is made although its tensors are of the right kind; "" if no reason is known.
std::string why_not_called(const std::string& overload);

}  // namespace tessera::testing
