#pragma once

#include <string>

// Ends the test case (or a rank's body) here; it counts as skipped, never as passed. The reason says what is missing
// and how to get it.
#define TESSERA_SKIP(reason)            \
  do {                                  \
    ::tessera::testing::skip((reason)); \
    return;                             \
  } while (false)

// Does the same where the machine lacks a program or a package that tools/setup installs: in CI the case has failed.
#define TESSERA_SKIP_MISSING(reason)            \
  do {                                          \
    ::tessera::testing::skip_missing((reason)); \
    return;                                     \
  } while (false)

namespace tessera::testing {

// Mark the running test case as skipped. A check that has failed before still makes it fail. Every thread may call
// them.
void skip(const std::string& reason);
void skip_missing(const std::string& reason);

}  // namespace tessera::testing
