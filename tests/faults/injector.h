#pragma once

#include <cstdint>
#include <string>

#include "tessera/tests/faults/fault_plan.h"

namespace tessera::faults {

// Prepares this process, a rank, for its fault: the one of kPlanVariable. `store` and `states` are the paths to which
// FaultPlan::place refers. Points and system calls are counted from here on.
void arm(int64_t rank, const std::string& store, const std::string& states);

// Marks a named point of the job. Does the fault if it is planned for this rank, here and now: "kill", "stop",
// "stop_go" (it goes on after a second), "throw" (std::runtime_error), "exit" (std::exit(0)), "quit" (_exit(0)),
// "abort". Before that it prints "fault NANOSECONDS", the time of CLOCK_MONOTONIC.
// Another fault is one that the caller does itself: it is returned. Otherwise the result is empty.
std::string at(const std::string& point);

// Returns how often this process has come to each point and made each system call: lines "visits POINT N" and
// "visits call:PLACE:CALL N".
std::string visits();

// Prints a line to standard output at once, which no interposed call delays.
void say(const std::string& line);

}  // namespace tessera::faults
