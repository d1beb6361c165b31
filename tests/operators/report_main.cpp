// Prints docs/operators.md. With an overload's name or a part of it, prints what is found for those overloads, one line
// each; with K/N, prints the K-th of N parts of all overloads.

#include <algorithm>
#include <iostream>

#include "tessera/tests/operators/calls.h"
#include "tessera/tests/operators/survey.h"

using namespace tessera::testing;  // NOLINT(google-build-using-namespace)

namespace {

void print(const std::string& overload) {
  std::cerr << overload << std::endl;
  const Entry entry = survey(overload);
  std::cout << to_string(entry.status) << '\t' << to_string(entry.gradient) << '\t' << overload << '\t' << entry.text
            << '\t' << entry.gradient_text << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> overloads = tensor_overloads();
  if (argc == 1) {
    std::vector<Entry> entries;
    for (const std::string& overload : overloads) entries.push_back(survey(overload));
    std::cout << operators_page(entries);
    return 0;
  }
  const std::string part = argv[1];
  const auto slash = part.find('/');
  const std::size_t parts = slash == std::string::npos ? 1 : std::stoul(part.substr(slash + 1));
  for (std::size_t i = 0; i < overloads.size(); ++i) {
    const bool wanted = slash == std::string::npos ? overloads[i].find(part) != std::string::npos
                                                   : i % parts == std::stoul(part.substr(0, slash));
    if (wanted && (argc < 3 || overloads[i] > argv[2])) print(overloads[i]);
  }
  return 0;
}
