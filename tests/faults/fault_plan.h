#pragma once

#include <cstdint>
#include <string>

namespace tessera::faults {

// Says which fault one rank of a job has, and when. It travels to the ranks as text in kPlanVariable.
struct FaultPlan {
  static constexpr int64_t kNobody = -1;
  static constexpr int64_t kEveryone = -2;

  int64_t rank = kNobody;     // the victim
  std::string fault;          // see Injector::do_fault
  std::string point;          // a named point of the job, or "call" for a system call
  std::string call = "any";   // with "call": a name of kCalls in system_calls.h, or any of them
  std::string place = "any";  // with "call": "store", "states" or "other", which the call's file must belong to
  int64_t count = 1;          // the fault comes at the count-th visit of the point, or at the count-th such call
  int error = 0;              // for the fault "error": what the system call reports
  bool lasting = false;       // for the fault "error": the later calls fail too

  friend bool operator==(const FaultPlan&, const FaultPlan&) = default;
};

inline constexpr const char* kPlanVariable = "TESSERA_FAULT";

// Returns text such as "rank=1 fault=kill point=save count=3".
std::string to_string(const FaultPlan& plan);
// Throws std::invalid_argument on other text than that of to_string().
FaultPlan parse_fault_plan(const std::string& text);

}  // namespace tessera::faults
