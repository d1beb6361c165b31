#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/tests/ops/rules/missing.h"

namespace tessera::testing {

// Returns every sample of the families of rules, made ones included, drawn twice each. Operators that draw, that write
// an argument or that use only sizes are left out.
std::vector<Draws> forms();

// Returns what missing_strategies finds, or why it could not be run, one line each.
std::string findings(const Draws& draws);

// Returns what `work` returns. It runs in its own process, for kernels that do not check their arguments; if a signal
// ends that process, returns e.g. "ended by signal 11\n".
std::string in_child(const std::function<std::string()>& work);

}  // namespace tessera::testing
