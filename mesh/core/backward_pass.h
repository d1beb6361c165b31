#pragma once

#include <torch/csrc/autograd/graph_task.h>

namespace tessera {

// Returns whether this thread runs a backward pass of autograd, as the hooks and functions that it calls see.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace tessera
