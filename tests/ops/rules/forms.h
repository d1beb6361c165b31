#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/tests/ops/rules/missing.h"

namespace tessera::testing {

// Every sample of the families of rules, made ones too, drawn twice; but those of operators that draw, that write an
// argument, or that take only sizes.
std::vector<Draws> forms();

// What missing_strategies finds, or why it found nothing out, a line each.
std::string findings(const Draws& draws);

// What `work` returns, run in a process of its own, for kernels that do not check what they are given; "ended by signal
// 11\n" where it ends so.
std::string in_child(const std::function<std::string()>& work);

}  // namespace tessera::testing
