#pragma once

#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

namespace tessera::testing {

// Checks that `call` throws an Error with `part` in its text.
template <typename Error = std::invalid_argument, typename Call>
void check_refused(const Call& call, const std::string& part) {
  CAPTURE(part);
  CHECK_THROWS_WITH_AS(call(), doctest::Contains(part.c_str()), Error);
}

}  // namespace tessera::testing
