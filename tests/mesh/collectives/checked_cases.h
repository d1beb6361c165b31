#pragma once

#include <memory>

namespace tessera {
class World;
}

namespace tessera::testing {

// Checks every way in which the last of two or more ranks can disagree with the others: Checked throws on all of them.
void check_disagreements(const std::shared_ptr<World>& world);
// Checks that a correct program gives the same values and counts under Checked.
void check_agreement(const std::shared_ptr<World>& world);

}  // namespace tessera::testing
