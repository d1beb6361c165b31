#pragma once

#include <stdexcept>

namespace tessera {

// The ranks of one group issued collectives that do not match, or with arguments that do not match. Every rank of the
// group throws this error, with the same text, before any data is sent.
class MismatchError : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

}  // namespace tessera
