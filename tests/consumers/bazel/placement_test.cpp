// A user's test of a user's placement.

#include <memory>

#include <doctest/doctest.h>

#include "tessera/placement/placement.h"
#include "tessera/tests/custom_placement/placement_checks.h"

namespace {

// Deals the chunks out from the last rank to the first.
class Mirrored final : public tessera::Partition {
 public:
  Mirrored() : Partition("Mirrored", "") {}

  tessera::Intervals part(int64_t size, int64_t parts, int64_t index) const override {
    tessera::Intervals out;
    tessera::append(out, tessera::chunk_range(size, parts, parts - 1 - index));
    return out;
  }
};

}  // namespace

TEST_CASE("a mirrored shard goes to and from every built-in placement") {
  const tessera::Placement mirrored = tessera::Shard(0, std::make_shared<const Mirrored>());
  CHECK_NOTHROW(tessera::testing::check_placement(mirrored));
}
