#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

// Holds the state of Checked (mesh/collectives/checked.h) for one World.
//
// Invariants:
//   - Only the thread that communicates touches the members, except `enabled`, which any thread may read.
struct CheckState {
  std::atomic<bool> enabled{false};
  bool inside = false;  // in a check, whose own collectives are neither checked nor recorded
  std::string step;     // what is done in several collectives, such as a step of a redistribution
  std::map<std::vector<int64_t>, int64_t> serials;  // for each group, how many collectives have been checked
};

// Sets CheckState::inside while it lives.
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

// Sets CheckState::step while it lives.
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
