#pragma once

#include <string>

#include "tessera/tests/faults/outcome.h"
#include "tessera/tests/faults/trials.h"

namespace tessera::faults {

// Runs tools/launch (TESSERA_LAUNCH, or where bazel test puts it) with a job, and sends a signal to it, closes its
// output or leaves it unread for a second. Puts what is wrong into `outcome`, and returns what the job printed. Files
// that the launcher makes lie in `folder`.
std::string run_launcher_trial(const Row& row, const FaultPlan& plan, const std::string& backend,
                               const std::string& folder, Outcome& outcome);

}  // namespace tessera::faults
