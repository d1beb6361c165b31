#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Counts the assertions that a test program evaluates, by test case and subcase. The ranks of a test case are other
// processes: each writes its counts to a file, from which the process that started it adds them to its own.
namespace tessera::testing {

// Holds the names of a test case and of the subcases, from the outermost, in which an assertion stands.
using AssertionPlace = std::vector<std::string>;
using AssertionCounts = std::map<AssertionPlace, int64_t>;

// Returns one line for each place: the count and the names, with a tab before each name. Throws std::invalid_argument
// if a name has a tab or a newline, which parse_counts() would take for its end.
std::string to_lines(const AssertionCounts& counts);

// Reads what to_lines() wrote. Throws std::invalid_argument if a line has no count.
AssertionCounts parse_counts(const std::string& lines);

int64_t sum(const AssertionCounts& counts);

// Says where the next assertions stand. Only the thread that runs the test case may call these.
void enter_case(const std::string& name);
void enter_subcase(const std::string& name);
void leave_subcase();

// Adds assertions at the present place. Every thread may call it.
void add_assertion();

// Adds the counts of a rank, whose places begin with the present test case.
void add_assertions(const AssertionCounts& counts);

// Returns the counts of all places, or of the present test case.
AssertionCounts assertion_counts();
int64_t assertions_of_case();

}  // namespace tessera::testing
