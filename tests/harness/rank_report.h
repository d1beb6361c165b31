#pragma once

#include <cstdint>
#include <optional>
#include <string>

// Through these variables and files, the ranks of a test case and the process that started them communicate.
namespace tessera::testing {

// In a rank this variable holds the file and the name of the function that is its body. It is set in no other process.
inline constexpr const char* kCaseVariable = "TESSERA_TEST_CASE";
// Where all ranks are threads of one process, it holds in that process how many they are.
inline constexpr const char* kThreadsVariable = "TESSERA_TEST_THREADS";

// Returns true in a process that TESSERA_RANKS_TEST_CASE has started.
bool is_rank();

// These return the rank of this process, or of this thread where ranks are threads, the number of ranks and the path of
// their store. They throw std::logic_error outside a rank.
int64_t rank();
int64_t world_size();
std::string store_path();

// Returns the rank of this process among those that were started: 0 where all ranks are threads of it.
int64_t process_rank();

// Makes this thread rank `rank` of `size` as long as it exists.
class ThreadRank {
 public:
  ThreadRank(int64_t rank, int64_t size);
  ~ThreadRank();
  // Returns whether this thread is a rank.
  static bool is_here();
  ThreadRank(const ThreadRank&) = delete;
  ThreadRank& operator=(const ThreadRank&) = delete;
};

// Returns the file to which a rank writes the time of its first failure (CLOCK_MONOTONIC, nanoseconds).
std::string failure_file(const std::string& store_path, int64_t rank);

// Holds why a rank was skipped, and whether that is because something is missing that tools/setup installs.
struct RankSkip {
  std::string reason;
  bool is_missing = false;
};
// In a rank, writes why it is skipped to a file, which skip_of() reads in the process that started the rank. skip_of()
// returns nothing for a rank that was not skipped.
void report_skip(const std::string& reason, bool is_missing);
std::optional<RankSkip> skip_of(const std::string& store_path, int64_t rank);
// Returns the file that a rank writes when its body has ended, with or without a failure: to_lines() of its counts of
// assertions. A rank that exits without it has not run its test.
std::string end_file(const std::string& store_path, int64_t rank);

// A rank calls body_begins() each time its body starts, and report_end() at the end of main(), which writes end_file().
// In a process that the body has forked, and in one that has run no body, report_end() writes nothing.
void body_begins();
void report_end();

}  // namespace tessera::testing
