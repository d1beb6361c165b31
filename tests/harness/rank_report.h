#pragma once

#include <cstdint>
#include <string>

// How the ranks of a test case and the process that started them tell each other what happened.
namespace tessera::testing {

// In a rank: the name of the test case whose body it runs. Set in no other process.
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

}  // namespace tessera::testing
