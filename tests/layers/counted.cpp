#include "tessera/tests/layers/counted.h"

#include <map>

namespace tessera::testing {

std::string counted(const CommCounter& counter) {
  std::map<std::string, int64_t> counts;
  for (const CollectiveRecord& record : counter.records()) ++counts[record.kind];
  std::string out;
  for (const auto& [kind, count] : counts) out += (out.empty() ? "" : ", ") + std::to_string(count) + " " + kind;
  return out;
}

}  // namespace tessera::testing
