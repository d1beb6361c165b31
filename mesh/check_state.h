#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

// What Checked (mesh/collectives/checked.h) keeps in a World. But for `enabled`, touched by the thread that
// communicates alone.
struct CheckState {
  std::atomic<bool> enabled{false};
  bool inside = false;                              // a check: what it communicates is neither checked nor recorded
  std::string step;                                 // of a redistribution, now being run
  std::map<std::vector<int64_t>, int64_t> serials;  // collectives checked so far, by group
};

// Sets `inside` while it lives.
class InsideCheck {
 public:
  explicit InsideCheck(CheckState& state) : state_(state), previous_(std::exchange(state.inside, true)) {}
  ~InsideCheck() { state_.inside = previous_; }
  InsideCheck(const InsideCheck&) = delete;
  InsideCheck& operator=(const InsideCheck&) = delete;

 private:
  CheckState& state_;
  const bool previous_;
};

// Names the step of a redistribution while it lives.
class CheckedStep {
 public:
  CheckedStep(CheckState& state, std::string step)
      : state_(state), previous_(std::exchange(state.step, std::move(step))) {}
  ~CheckedStep() { state_.step = std::move(previous_); }
  CheckedStep(const CheckedStep&) = delete;
  CheckedStep& operator=(const CheckedStep&) = delete;

 private:
  CheckState& state_;
  std::string previous_;
};

}  // namespace tessera
