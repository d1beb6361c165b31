#pragma once

#include "tessera/styles/parallelize.h"

namespace tessera::testing {

// Is the plan of tensor parallelism for a Block (blocks.h).
inline const ParallelPlan kBlock = {{"attn.w[qkv]", ColwiseParallel()},
                                    {"attn.wo", RowwiseParallel()},
                                    {"mlp.up", ColwiseParallel()},
                                    {"mlp.down", RowwiseParallel()}};

}  // namespace tessera::testing
