// Prints docs/operators.md. With an overload's name or a part of it, prints what is found for those overloads, one line
// each; with K/N, prints the K-th of N parts of all overloads. A second argument leaves out the overloads up to that
// name. Ends with status 3 where an overload has cost this process the use of its GPU.

#include <iostream>

#include <ATen/ATen.h>

#include "tessera/tests/harness/device.h"
#include "tessera/tests/operators/calls.h"
#include "tessera/tests/operators/survey.h"

using namespace tessera::testing;  // NOLINT(google-build-using-namespace)

namespace {

// Says whether a kernel's failed assertion has ended this process's use of the GPU.
bool device_is_lost() {
  try {
    return at::ones({1}, on(at::kFloat)).item<float>() != 1;
  } catch (const std::exception&) {
    return true;
  }
}

void print(const std::string& overload) {
  std::cerr << overload << std::endl;
  Entry entry{.overload = overload};
  try {
    entry = survey(overload);
  } catch (const std::exception& error) {
    entry.text = error.what();
  }
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
    if (!wanted || (argc > 2 && overloads[i] <= argv[2])) continue;
    print(overloads[i]);
    if (device_is_lost()) return 3;
  }
  return 0;
}
