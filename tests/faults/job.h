#pragma once

#include <string>
#include <vector>

namespace tessera::faults {

// Runs one rank of the campaign's job: a small training in float64 which is the same, bit by bit, whenever it runs on
// the same number of ranks. Its training states are in `folder`/states. The first of `arguments` says what it does:
//   train FOLDER DATA_SEED   trains kSteps steps, saves a training state at each (every second one asynchronously),
//                            and loads the last one
//   verify FOLDER DATA_SEED  loads the newest state, and saves another one
//   talk FOLDER LINES        prints lines, and joins the others before and after
// Returns the exit code. An error is printed as "error: TEXT". Other lines:
//   fault TIME          see injector.h
//   state STEP HASH     is the hash of the weights and the optimizer's state after a step
//   saved STEP          comes when a state is in its folder
//   newest STEP HASH    is what `verify` found; "newest none" if there is no state
//   visits WHAT N       see injector.h
//   done                comes when this rank has all it wants, with nothing left but to end
int run_job(const std::vector<std::string>& arguments);

inline constexpr int kSteps = 4;

}  // namespace tessera::faults
