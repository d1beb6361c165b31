#pragma once

#include <string>

namespace tessera::testing {

// Whether this test's target asks for MPI: `backends` of tools/build_defs.bzl.
bool is_over_mpi();
// Why ranks cannot be started over MPI, as text for TESSERA_SKIP; empty where they can.
std::string why_no_mpi();

}  // namespace tessera::testing
