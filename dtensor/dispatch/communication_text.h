#pragma once

#include <string>

#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {

// Describes what a call would communicate, for errors and warnings: "; Float [4] ... would go to [R] by ...".
std::string communication_text(const Call& call, const Decision& decision);

// Says for which tensor a kernel communicates: "the ranks join what each of them finds in its piece of Float [4] ...".
std::string join_text(const Decision& decision);

}  // namespace tessera::dispatch
