#pragma once

#include <string>
#include <vector>

#include "tessera/tests/operators/validate.h"

namespace tessera::testing {

// What is known of an overload.
enum class Status : uint8_t {
  kByRule,
  kReplicated,
  kRefused,
  kWrong,
  kNotCalled,   // no arguments were found that plain tensors allow
  kOutOfScope,  // tensors of another kind, or another device's
};

struct Entry {
  std::string overload;  // "aten::add.Tensor"
  Status status;
  std::string text;  // what was refused or wrong; why it is out of scope
};

// One overload, by all its calls: the worst finding.
Entry survey(const std::string& overload);

// The page docs/operators.md.
std::string operators_page(const std::vector<Entry>& entries);

const char* to_string(Status status);

}  // namespace tessera::testing
