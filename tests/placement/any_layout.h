#pragma once

#include <cstdint>
#include <iosfwd>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <doctest/doctest.h>
#include <rapidcheck.h>

#include "tessera/placement/placement.h"

// Tensors, meshes and layouts drawn at random by RapidCheck, which makes what fails smaller.
namespace tessera::testing {

// Two layouts of a tensor: on a mesh of 1 to 3 dimensions and up to 8 ranks, a shape of 0 to 3 dimensions of 0 to 9.
struct Change {
  std::vector<int64_t> mesh_shape;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kDouble;
  Placements from;  // normalized, legal
  Placements to;
};
std::ostream& operator<<(std::ostream& out, const Change& change);

rc::Gen<Change> any_change();
// Any built-in one, on any dimension, in any order; it need not be legal anywhere.
rc::Gen<Placement> any_placement();

// Sets the seed and the number of examples where RC_PARAMS is not set, so that a test is the same at every run.
void fix_seed();

// CHECKs that `property`, which draws by *any_change() and the like, holds for every example; stderr says for which it
// does not.
template <typename Property>
void check_property(Property property) {
  fix_seed();
  DOCTEST_CHECK(rc::check(std::move(property)));
}

}  // namespace tessera::testing
