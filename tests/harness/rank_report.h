#pragma once

#include <cstdint>
#include <string>

// How the ranks of a test case and the process that started them tell each other what happened.
namespace tessera::testing {

// In a rank: the file and the name of the function that is the body it runs. Set in no other process.
inline constexpr const char* kCaseVariable = "TESSERA_TEST_CASE";

// True in a process that TESSERA_RANKS_TEST_CASE started.
bool is_rank();

// This process's rank, the number of ranks and the file in which they meet. Throw std::logic_error outside a rank.
int64_t rank();
int64_t world_size();
std::string store_path();

// Where a rank writes the time (CLOCK_MONOTONIC, nanoseconds) of its first failure, and why it was skipped.
std::string failure_file(const std::string& store_path, int64_t rank);
std::string skip_file(const std::string& store_path, int64_t rank);
// What a rank writes when its body has ended, well or not: one that exits without it has not run its test.
std::string end_file(const std::string& store_path, int64_t rank);

// In a rank: its body begins, maybe again; and at the end of main(), the report of that. A process that the body
// forked, and one that found no body, reports nothing.
void body_begins();
void report_end();

}  // namespace tessera::testing
