// Prints docs/operators.md; with a name or a part of one, what is found of those overloads, a line each.

#include <iostream>

#include "tessera/tests/operators/calls.h"
#include "tessera/tests/operators/survey.h"

using namespace tessera::testing;  // NOLINT(google-build-using-namespace)

int main(int argc, char** argv) {
  std::vector<Entry> entries;
  for (const std::string& overload : tensor_overloads()) {
    if (argc > 1 && overload.find(argv[1]) == std::string::npos) continue;
    if (argc > 2 && overload <= argv[2]) continue;
    if (argc > 1) std::cerr << overload << std::endl;
    entries.push_back(survey(overload));
    if (argc > 1)
      std::cout << to_string(entries.back().status) << '\t' << overload << '\t' << entries.back().text << std::endl;
  }
  if (argc == 1) std::cout << operators_page(entries);
  return 0;
}
