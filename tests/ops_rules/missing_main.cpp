#include <chrono>
#include <cstdio>
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include "tessera/tests/ops_rules/forms.h"
using namespace tessera::testing;
int main(int argc, char** argv) {
  at::set_num_threads(1);
  const auto all = forms();
  fprintf(stderr, "%zu forms\n", all.size());
  for (const Draws& draws : all) {
    if (argc > 1 && draws[0].op.find(argv[1]) == std::string::npos) continue;
    const auto t0 = std::chrono::steady_clock::now();
    const std::string text = in_child([&] {
      std::string out;
      try {
        for (const auto& s : missing_strategies(draws)) out += "   " + to_string(s) + "\n";
      } catch (const std::exception& e) { out = std::string("threw ") + std::string(e.what()).substr(0, 300) + "\n"; }
      return out;
    });
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t0).count();
    printf("%s  [%zu draws, %.0f ms]\n%s", title(draws[0]).c_str(), draws.size(), ms, text.c_str());
    if (!text.empty() && text.back() != '\n') printf("\n");
    fflush(stdout);
  }
}
