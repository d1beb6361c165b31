#pragma once

#include <memory>
#include <string>

#include <doctest/doctest.h>

#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/world.h"

// Tests what Checked compares of DTensors, on ranks of any kind.
namespace tessera::testing {

// Checks that `call` throws a MismatchError with `part` in its text.
template <typename Call>
void check_mismatch(const Call& call, const std::string& part) {
  CAPTURE(part);
  CHECK_THROWS_WITH_AS(call(), doctest::Contains(part.c_str()), MismatchError);
}

// Runs on two ranks, of which the last holds another value.
void check_unequal(const std::shared_ptr<World>& world);

}  // namespace tessera::testing
