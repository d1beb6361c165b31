#pragma once

#include <array>
#include <string_view>

#include "tessera/tests/faults/fault_plan.h"

namespace tessera::faults {

// Names the system calls that system_calls.cpp takes the place of, in the whole program. "create" is an open or openat
// that may make a file. A write or pwrite counts only where it goes to the store or to the states.
inline constexpr std::array<std::string_view, 9> kCalls = {"open",   "create", "write",  "pwrite",  "linkat",
                                                           "rename", "fsync",  "socket", "unlinkat"};
inline constexpr std::array<std::string_view, 3> kPlaces = {"store", "states", "other"};

// Starts counting, with the fault of `plan` where `is_victim`. The plan and the paths must live as long as the process.
void watch_calls(const FaultPlan& plan, bool is_victim, const char* store, const char* states);

// Returns how many calls of kCalls[call] have gone to kPlaces[place].
int64_t calls_made(std::size_t place, std::size_t call);

// Prints "fault NANOSECONDS" by a system call of its own.
void say_fault();

}  // namespace tessera::faults
