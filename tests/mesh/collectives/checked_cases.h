#pragma once

#include <memory>

namespace tessera {
class World;
}

namespace tessera::testing {

// Every way in which the last rank of two or more can disagree with the others, found by Checked on all of them.
void check_disagreements(const std::shared_ptr<World>& world);
// A correct program under Checked: same values, same counts.
void check_agreement(const std::shared_ptr<World>& world);

}  // namespace tessera::testing
