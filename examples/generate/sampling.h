#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/examples/generate/generate_options.h"
#include "tessera/mesh/device_mesh.h"

// Returns the next token, the same on every rank, given its logits: a plain tensor [vocabulary] that every rank has.
//
// The draw depends on the mesh's random state (tessera::manual_seed) and not on the number of ranks: one number,
// uniform in [0, 1), is looked up among the sums of the probabilities, which are computed in float64 in the order of
// the tokens. Tokens that are as likely as the last of the `top_k` are drawn too. Does not communicate.
// Throws std::invalid_argument when the temperature is negative, infinite or NaN, and std::runtime_error, on every
// rank, when a logit is NaN or the largest is infinite.
int64_t choose_token(const at::Tensor& logits, const Sampling& sampling, const tessera::DeviceMesh& mesh);
