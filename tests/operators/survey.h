#pragma once

#include <string>
#include <vector>

#include "tessera/tests/operators/trials.h"

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

// What is known of its gradients.
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
  std::string text = {};           // what was refused or wrong; why it was not called; "" where it is right
  std::string gradient_text = {};  // the same of its gradients
};

// One overload, by all its calls: the worst findings.
Entry survey(const std::string& overload);

// The page docs/operators.md.
std::string operators_page(const std::vector<Entry>& entries);
// What the page says, overload by overload; texts as far as they are shown there. Throws std::invalid_argument on a row
// that is none.
std::vector<Entry> entries_of(const std::string& page);
// The line of the page that an overload stands on were it alone, behind its section's title.
std::string line_of(const Entry& entry);

const char* to_string(Status status);
const char* to_string(Gradient gradient);

}  // namespace tessera::testing
