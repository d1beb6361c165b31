#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Scales the gradients of `parameters` in place, all by one number, so that the norm of all their elements together is
// at most `max_norm`; returns the norm before that. It means what torch::nn::utils::clip_grad_norm_ means for the same
// model in one process, for parameters that are plain or DTensors, on one mesh or several, of any placements and
// dtypes: each element counts once, however it is cut or replicated. The norms of parts of 4096 elements are computed
// in the gradient's dtype, of halves in float, and joined in double. A tensor that is listed twice counts once.
// Gradients that are undefined do not count, also where they are on some ranks only. With a norm that is not finite all
// gradients are scaled by a number that is 0 or not finite, as LibTorch does; with `error_if_nonfinite` that throws
// std::runtime_error, before any is scaled.
//
// `norm_type` is positive; infinity stands for the largest absolute value.
//
// Every rank lists the same parameters, of which some may lie on meshes that do not contain it; or, with slices of a
// mesh, the parameters on the slices that contain it. The result is then the same on every rank. A plain gradient must
// be the same on every rank. Where ranks hold different parameters along a mesh, such as the stages of a pipeline, give
// `stages`, e.g. mesh["pp"]: what ranks along it hold is added up, plain gradients too.
//
// Communication, under "clip_grad_norm_": one all_reduce of 8 bytes (infinity: 16) per mesh dimension that cuts some
// parameter that requires a gradient, for all parameters together. Mesh dimensions of different meshes that have the
// same ranks share one. With meshes of different ranks max_over_meshes (dtensor/over_meshes.h) follows, of 16 bytes per
// mesh. `stages` adds one per mesh dimension. What is pending in a gradient is reduced before; backward leaves nothing
// pending. Throws std::invalid_argument, alike on every rank, on a negative or NaN `max_norm`, a `norm_type` that is
// not positive, an undefined parameter, and a plain gradient that is sparse; with `stages` the last two fail the job,
// since the other stages may have none. A rank that `stages` does not contain gets that exception too.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false, const std::optional<DeviceMesh>& stages = std::nullopt);

// Does the same for one parameter.
double clip_grad_norm_(const at::Tensor& parameter, double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false, const std::optional<DeviceMesh>& stages = std::nullopt);

// Does the same, and waits for nothing: the norm is a number of float64 on the device of the gradients, and scales them
// there. A norm that is not finite makes them 0 or not finite.
at::Tensor clip_grad_norm_on_device_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                                     const std::optional<DeviceMesh>& stages = std::nullopt);

}  // namespace tessera
