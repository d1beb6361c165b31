#pragma once

#include <string>

#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {

// Describes what a call would communicate, for errors and warnings: "; Float [4] ... would go to [R] by ...".
std::string communication_text(const Call& call, const Decision& decision);

}  // namespace tessera::dispatch
