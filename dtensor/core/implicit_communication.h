#pragma once

#include <stdexcept>

namespace tessera {

// What Strict throws: a std::runtime_error of its own kind, so that the library tells it from a failure of the job. The
// library's own.
class ImplicitCommunication : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

}  // namespace tessera
