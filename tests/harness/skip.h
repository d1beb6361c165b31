#pragma once

#include <string>

// Ends the test case (or a rank's body) here; it counts as skipped, never as passed. The reason says what is missing
// and how to get it.
#define TESSERA_SKIP(reason)            \
  do {                                  \
    ::tessera::testing::skip((reason)); \
    return;                             \
  } while (false)

namespace tessera::testing {

// Marks the running test case as skipped. A check that has failed before still makes it fail.
void skip(const std::string& reason);

}  // namespace tessera::testing
