#include <fstream>
#include <map>
#include <string>

#include <doctest/doctest.h>

#include "tessera/tests/harness/skip.h"

namespace {

// Returns what stands between `before` and `after` in the line, or "" if it lacks one of them.
std::string between(const std::string& line, const std::string& before, const std::string& after) {
  const std::size_t at = line.find(before);
  if (at == std::string::npos) return "";
  const std::size_t begin = at + before.size();
  const std::size_t end = line.find(after, begin);
  return end == std::string::npos ? "" : line.substr(begin, end - begin);
}

}  // namespace

TEST_CASE("no kernel spills a register") {
  std::ifstream report("gpu_kernels/ptxas_report.txt");
  if (!report) TESSERA_SKIP("there is no nvcc to compile the kernels with; set CUDA_HOME to a CUDA 13 toolkit");
  std::map<std::string, int> kernels;  // per kind of GPU
  std::string kernel;
  for (std::string line; std::getline(report, line);) {
    if (const std::string target = between(line, "' for '", "'"); !target.empty()) {
      ++kernels[target];
      kernel = line;
    }
    if (line.find("spill") == std::string::npos) continue;
    CAPTURE(kernel);
    CHECK(between(line, "stack frame, ", ",") == "0 bytes spill stores");
  }
  CHECK(kernels["sm_80"] > 0);
  CHECK(kernels["sm_75"] == kernels["sm_80"]);
  CHECK(kernels["sm_90a"] == kernels["sm_80"]);
}
