#include "tessera/mesh/core/last_words.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>

#include <fmt/format.h>

#include "tessera/mesh/core/within.h"

namespace tessera {

void leave_at_once(const std::string& why, std::chrono::milliseconds patience) {
  try {
    within(patience, "writing the last words", [why] {
      fmt::print(stderr, "{}\n", why);
      std::cout.flush();
      std::fflush(nullptr);
    });
  } catch (const std::exception&) {
    // The exit code has to do.
  }
  std::_Exit(EXIT_FAILURE);
}

}  // namespace tessera
