#pragma once

#include <string>

namespace tessera::testing {

// Returns whether this test's target asks for MPI, by `backends` of tools/build_defs.bzl.
bool is_over_mpi();
// Returns why ranks cannot be started over MPI, as text for TESSERA_SKIP_MISSING, or "" if they can.
std::string why_no_mpi();

}  // namespace tessera::testing
