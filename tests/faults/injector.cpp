#include "tessera/tests/faults/injector.h"

#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>

#include <fmt/format.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/tests/faults/system_calls.h"

namespace tessera::faults {
namespace {

// It is never destroyed, since threads may come to a point while the process ends.
struct State {
  FaultPlan plan;
  bool is_victim = false;
  std::string store, states;
  std::mutex mutex;  // guards the rest
  std::map<std::string, int64_t> visits;
};
State& state = *new State;

// Stops this process for a second; a child of it lets it go on.
void stop_for_a_second() {
  const pid_t self = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    ::usleep(1'000'000);
    ::kill(self, SIGCONT);
    ::_exit(0);
  }
  std::raise(SIGSTOP);  // stops this thread at once, where kill() of the process might let it run on for a moment
  ::waitpid(child, nullptr, 0);
}

std::string do_fault(const std::string& fault, const std::string& point) {
  say_fault();
  if (fault == "kill") ::kill(::getpid(), SIGKILL);
  if (fault == "stop") std::raise(SIGSTOP);
  if (fault == "stop_go") stop_for_a_second();
  if (fault == "throw") throw std::runtime_error(fmt::format("the planned fault at {}", point));
  if (fault == "exit") std::exit(0);
  if (fault == "quit") ::_exit(0);
  if (fault == "abort") std::abort();
  return fault;
}

}  // namespace

void arm(int64_t rank, const std::string& store, const std::string& states) {
  const char* const text = std::getenv(kPlanVariable);
  if (text != nullptr) state.plan = parse_fault_plan(text);
  state.is_victim = state.plan.rank == rank || state.plan.rank == FaultPlan::kEveryone;
  state.store = store;
  state.states = states;
  watch_calls(state.plan, state.is_victim, state.store.c_str(), state.states.c_str());
}

std::string at(const std::string& point) {
  int64_t visit = 0;
  {
    const std::lock_guard lock(state.mutex);
    visit = ++state.visits[point];
  }
  if (!state.is_victim || state.plan.point != point || state.plan.count != visit) return "";
  return do_fault(state.plan.fault, point);
}

std::string visits() {
  std::string text;
  {
    const std::lock_guard lock(state.mutex);
    for (const auto& [point, count] : state.visits) text += fmt::format("visits {} {}\n", point, count);
  }
  for (std::size_t place = 0; place < kPlaces.size(); ++place) {
    for (std::size_t call = 0; call < kCalls.size(); ++call) {
      text += fmt::format("visits call:{}:{} {}\n", kPlaces[place], kCalls[call], calls_made(place, call));
    }
  }
  if (!text.empty()) text.pop_back();
  return text;
}

void say(const std::string& line) {
  const std::string whole = line + "\n";
  ::syscall(SYS_write, STDOUT_FILENO, whole.data(), whole.size());
}

}  // namespace tessera::faults
