#pragma once

// Includes what most programs use: meshes, DTensors, styles, training, and files of weights and of training states. A
// source that includes only the headers that it needs compiles faster; the API reference lists them all.

#include "tessera/dtensor/clip_grad_norm.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/explain.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/fused_adamw.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/activation_checkpoint.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/placement/placement.h"
#include "tessera/styles/clone.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/distribute_module.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/version.h"
