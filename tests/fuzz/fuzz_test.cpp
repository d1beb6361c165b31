// Gives every subject its seeds and inputs that are made of them by a seed of this test's own. tools/fuzz searches
// further, guided by what the inputs reach.

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/fuzz/subjects.h"

using namespace tessera::fuzz;

TEST_CASE("every subject accepts its seeds") {
  for (const Subject& each : subjects()) {
    CAPTURE(each.name);
    for (const std::string& seed : each.seeds) {
      CAPTURE(seed);
      CHECK_NOTHROW(each.read(seed));
    }
  }
}

TEST_CASE("no input makes a reader throw anything but invalid_argument and runtime_error, or take a second") {
  constexpr uint64_t kInputs = 3000;
  for (const Subject& each : subjects()) {
    for (uint64_t seed = 0; seed < kInputs; ++seed) {
      const std::string input = mutated(each.seeds, seed);
      const auto before = std::chrono::steady_clock::now();
      try {
        try_input(each, input);
      } catch (const std::exception& error) {
        FAIL_CHECK(fmt::format("{}, input {}: {}: {}", each.name, seed, error.what(), input));
      }
      // Sanitizers slow a reader down; a search that never ends is found all the same.
      if (std::chrono::steady_clock::now() - before > std::chrono::seconds(10)) {
        FAIL_CHECK(fmt::format("{}, input {} took more than 10 s: {}", each.name, seed, input));
      }
    }
  }
  CHECK(subjects().size() >= 12);
}

TEST_CASE("a defect of a reader is passed on") {
  const Subject bad = {"bad", [](std::string_view) { throw std::logic_error("a property"); }, {"x"}};
  CHECK_THROWS_AS(try_input(bad, "x"), std::logic_error);
  const Subject odd = {"odd", [](std::string_view) { throw std::bad_alloc(); }, {"x"}};
  CHECK_THROWS_AS(try_input(odd, "x"), std::bad_alloc);
}
