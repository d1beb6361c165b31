#pragma once

#include <cstdint>
#include <iosfwd>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <doctest/doctest.h>
#include <rapidcheck.h>

#include "tessera/placement/placement.h"

// RapidCheck draws tensors, meshes and layouts at random by these functions. It makes a failing example smaller.
namespace tessera::testing {

// Holds two layouts of a tensor of 0 to 3 dimensions of sizes 0 to 9, on a mesh of 1 to 3 dimensions and up to 8 ranks.
struct Change {
  std::vector<int64_t> mesh_shape;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kDouble;
  Placements from;  // normalized and legal
  Placements to;
};
std::ostream& operator<<(std::ostream& out, const Change& change);

rc::Gen<Change> any_change();
// Draws any placement that the library defines, on any dimension, in any order. It need not be legal for any tensor.
rc::Gen<Placement> any_placement();

// Sets the seed and the number of examples unless RC_PARAMS is set, so that every run of a test is the same.
void fix_seed();

// CHECKs that `property`, which draws by *any_change() and the like, holds for every example. Prints the example for
// which it does not to stderr.
template <typename Property>
void check_property(Property property) {
  fix_seed();
  DOCTEST_CHECK(rc::check(std::move(property)));
}

}  // namespace tessera::testing
