#pragma once

#include <string>

namespace train {

// A job that starts its ranks again after a failure (tools/launch --restarts, torchrun --max-restarts) goes on with the
// run that it has begun or resumed. The file "job" in the run's folder names that job.

// Returns whether this process was started again by the job that the folder names.
bool is_restart_of(const std::string& run);

// Names this job in the run's folder. One rank calls it.
void note_job(const std::string& run);

// Undoes note_job() of a job with this job's name: torchrun calls every job "none" unless it is told otherwise. Call it
// where the run is refused, so that a restart is refused too.
void forget_job(const std::string& run);

}  // namespace train
