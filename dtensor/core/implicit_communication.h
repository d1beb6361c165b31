#pragma once

#include <stdexcept>

namespace tessera {

// Strict throws this type, so that the library can tell it from a failure of the job. It is internal to the library.
class ImplicitCommunication : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

}  // namespace tessera
