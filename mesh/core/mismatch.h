#pragma once

#include <stdexcept>

namespace tessera {

// The ranks of one group came to the same collective with operations or arguments that do not fit. Every rank of the
// group throws it, with the same text, before anything has moved.
class MismatchError : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

}  // namespace tessera
