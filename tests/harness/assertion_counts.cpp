#include "tessera/tests/harness/assertion_counts.h"

#include <mutex>
#include <sstream>
#include <stdexcept>

namespace tessera::testing {
namespace {

// Invariants:
//   - place is empty before the first test case, and begins with the name of the present one after it.
//   - Assertions may run on several threads at once, so each access holds the mutex.
struct State {
  std::mutex mutex;
  AssertionPlace place;
  AssertionCounts counts;
  int64_t of_case = 0;
};

State& state() {
  static State only;
  return only;
}

}  // namespace

std::string to_lines(const AssertionCounts& counts) {
  std::string lines;
  for (const auto& [place, count] : counts) {
    lines += std::to_string(count);
    for (const std::string& name : place) {
      if (name.find_first_of("\t\n") != std::string::npos) {
        throw std::invalid_argument("the name \"" + name + "\" has a tab or a newline; give a test another name");
      }
      lines += "\t" + name;
    }
    lines += "\n";
  }
  return lines;
}

AssertionCounts parse_counts(const std::string& lines) {
  AssertionCounts counts;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::string field;
    std::getline(fields, field, '\t');
    if (field.empty() || field.find_first_not_of("0123456789") != std::string::npos) {
      throw std::invalid_argument("no line of assertion counts: \"" + line +
                                  "\"; a count and names with tabs are wanted");
    }
    const int64_t count = std::stoll(field);
    AssertionPlace place;
    while (std::getline(fields, field, '\t')) place.push_back(field);
    counts[place] += count;
  }
  return counts;
}

int64_t sum(const AssertionCounts& counts) {
  int64_t total = 0;
  for (const auto& entry : counts) total += entry.second;
  return total;
}

void enter_case(const std::string& name) {
  const std::lock_guard lock(state().mutex);
  state().place = {name};
  state().of_case = 0;
}

void enter_subcase(const std::string& name) {
  const std::lock_guard lock(state().mutex);
  state().place.push_back(name);
}

void leave_subcase() {
  const std::lock_guard lock(state().mutex);
  if (state().place.size() > 1) state().place.pop_back();
}

void add_assertion() {
  const std::lock_guard lock(state().mutex);
  ++state().counts[state().place];
  ++state().of_case;
}

void add_assertions(const AssertionCounts& counts) {
  const std::lock_guard lock(state().mutex);
  for (const auto& [place, count] : counts) state().counts[place] += count;
  state().of_case += sum(counts);
}

AssertionCounts assertion_counts() {
  const std::lock_guard lock(state().mutex);
  return state().counts;
}

int64_t assertions_of_case() {
  const std::lock_guard lock(state().mutex);
  return state().of_case;
}

}  // namespace tessera::testing
