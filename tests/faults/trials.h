#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tests/faults/fault_plan.h"
#include "tessera/tests/faults/outcome.h"
#include "tessera/tests/faults/ranks_run.h"
#include "tessera/tests/faults/rows.h"

namespace tessera::faults {

// Draws the same numbers from the same row and seed, on every machine.
class Draw {
 public:
  Draw(const std::string& row, uint64_t seed);
  int64_t below(int64_t limit);
  template <typename Value>
  Value one_of(const std::vector<Value>& values) {
    return values[static_cast<std::size_t>(below(static_cast<int64_t>(values.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

// Holds what the job does without a fault.
struct CleanJob {
  std::vector<std::string> states;                           // "STEP HASH"
  std::map<int64_t, std::map<std::string, int64_t>> visits;  // of each rank: "POINT" or "call:PLACE:CALL" -> how often
};

struct TrialReport {
  std::string what;  // number of ranks and fault
  bool fault_came = false;
  bool exits_late = false;  // see exits_late()
  double seconds = 0;
  std::vector<Miss> misses;
  std::string output;
};

// Runs trials over one backend for CPU tensors.
class Trials {
 public:
  explicit Trials(std::string backend) : backend_(std::move(backend)) {}

  // With `given` that fault comes in place of the drawn one: how often a rank makes a system call may depend on time.
  // Throws std::runtime_error when the job fails without a fault, so that nothing can be compared with it.
  TrialReport run(const Row& row, uint64_t seed, const std::optional<FaultPlan>& given = std::nullopt);

 private:
  struct Trial;

  const CleanJob& clean_job(int64_t size, int64_t data_seed);
  FaultPlan draw_plan(const Row& row, int64_t size, Draw& draw);
  void run_job_trial(Trial& trial);
  void run_two_savers(Trial& trial);
  void run_second_job(Trial& trial);
  void run_stale_store(Trial& trial);
  void run_port_taken(Trial& trial);
  void load_states(Trial& trial, int64_t size);

  const std::string backend_;
  std::map<std::pair<int64_t, int64_t>, CleanJob> clean_jobs_;
};

}  // namespace tessera::faults
