#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/tests/harness/over_mpi.h"
#include "tessera/tools/launcher/process_group.h"

// Skips a test over MPI where the build has none. Include tessera/tests/harness/skip.h to use it.
#define TESSERA_SKIP_WITHOUT_MPI()                                                \
  if (tessera::testing::is_over_mpi() && !tessera::testing::why_no_mpi().empty()) \
  TESSERA_SKIP_MISSING(tessera::testing::why_no_mpi())

namespace tessera::testing {

struct Line {
  std::chrono::steady_clock::time_point time;
  std::string text;
};

struct Job {
  std::map<int64_t, std::vector<Line>> lines;                      // keyed by rank
  std::map<int64_t, std::chrono::steady_clock::time_point> ended;  // when each rank's process had ended by itself
  ProcessGroupResult result;

  std::vector<Line> starting_with(int64_t rank, const std::string& start) const;
  std::string all() const;
};

struct Where {
  std::string victim;  // empty: the last rank
  std::string folder;  // of the store; empty: a new one
};

// Runs failing_job on `size` ranks, with `how` as its argument, over the backend that is tested.
Job run_job(const std::string& how, int64_t size, std::map<std::string, std::string> environment = {},
            const Where& where = {});

// Checks that every rank but the victim, which is the last one if it is not given, got an error with each of `parts`
// within `seconds` of the fault, and the same failure again at its next collective.
void check_others_ended(const Job& job, int64_t size, const std::vector<std::string>& parts, int64_t victim = -1,
                        double seconds = 5);

// Returns the environment of ranks that count as being on hosts of their own: they meet at a port.
std::map<std::string, std::string> tcp_store();

}  // namespace tessera::testing
