#pragma once

#include <string>
#include <vector>

#include "tessera/tests/operators/trials.h"

namespace tessera::testing {

// Says what the survey found for an overload.
enum class Status : uint8_t {
  kByRule,
  kReplicated,
  kRefused,
  kWrong,
  kNotCalled,   // no arguments were found that plain tensors allow
  kOutOfScope,  // its tensors are of another kind, or on another device
};

// Says what the survey found for its gradients.
enum class Gradient : uint8_t {
  kNone,  // LibTorch has none, or no call was made
  kRight,
  kRefused,
  kWrong,
};

struct Entry {
  std::string overload;  // "aten::add.Tensor"
  Status status = Status::kNotCalled;
  Gradient gradient = Gradient::kNone;
  std::string text = {};           // what was refused or wrong, or why it was not called; "" if it is right
  std::string gradient_text = {};  // likewise for its gradients
};

// Surveys one overload by all its calls and returns the worst findings.
Entry survey(const std::string& overload);

// Returns the page docs/operators.md.
std::string operators_page(const std::vector<Entry>& entries);
// Returns the page's entries, overload by overload, with texts as far as the page shows them. Throws
// std::invalid_argument on an invalid row.
std::vector<Entry> entries_of(const std::string& page);
// Returns the page's line for an overload as if it were alone in its row, after its section's title.
std::string line_of(const Entry& entry);

const char* to_string(Status status);
const char* to_string(Gradient gradient);

}  // namespace tessera::testing
