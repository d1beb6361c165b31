#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>

#include <torch/optim/schedulers/lr_scheduler.h>

namespace tessera {

// A derived class may name the protected member that counts the steps of any scheduler; no function gives it.
struct SchedulerSteps : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&SchedulerSteps::step_count_); }
};

inline int64_t scheduler_steps(torch::optim::LRScheduler& scheduler) { return SchedulerSteps::of(scheduler); }

inline void set_scheduler_steps(torch::optim::LRScheduler& scheduler, int64_t steps) {
  SchedulerSteps::of(scheduler) = static_cast<unsigned>(steps);
}

}  // namespace tessera
