#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/spec.h"
#include "tessera/placement/plan.h"

namespace tessera {

// Carries out `plan` (from plan_redistribute(spec.placements, ...)) on this rank's piece of a tensor of `spec`, step by step;
// placement/plan.h says which collective each step is. Uneven pieces are padded for all_gather and reduce_scatter; all_to_all
// sends exact pieces. The result may share storage with `local`, which is never written. No autograd. Outside the mesh: an
// empty tensor, no communication.
at::Tensor run_plan(const at::Tensor& local, const Spec& spec, const Plan& plan);

// plan_redistribute + run_plan, with the checks of check_partials.
at::Tensor redistribute_local(const at::Tensor& local, const Spec& spec, const Placements& to);

// Throws std::invalid_argument when a Partial in `placements` cannot be formed of `dtype`: avg of integers, sum, product or avg
// of bool, max or min of complex numbers, or two kinds that do not commute.
void check_partials(const Placements& placements, at::ScalarType dtype, const char* who);

}  // namespace tessera
