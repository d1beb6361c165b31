#include "tessera/dtensor/dispatch/refused_calls.h"

#include <stdexcept>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/mesh_checks.h"

namespace tessera::dispatch {
namespace {

// The local tensors of a DTensor are strided, and to_dense returns a DTensor as it is.
void refuse_other_layouts(const Call& call) {
  const std::string& name = call.traits.name;
  if (!name.starts_with("aten::_to_sparse") && name != "aten::to_mkldnn") return;
  throw std::invalid_argument(
      fmt::format("{}: a DTensor's pieces are strided ({}); call full_tensor, or to_local for this rank's piece, and "
                  "convert that",
                  name, to_string(*call.first_spec)));
}

// Pieces on another device would leave the mesh behind: the next collective would send tensors of another device.
void refuse_another_device(const Call& call) {
  const c10::FunctionSchema& schema = call.op.schema();
  const auto argument = schema.argumentIndexWithName("device");
  // Operators that make a tensor have both arguments; an out= has its own device.
  if (!argument || !schema.argumentIndexWithName("layout") || schema.returns().empty()) return;
  const at::IValue& given = call.arg(static_cast<std::size_t>(*argument));
  if (given.isNone() || given.toDevice().is_meta()) return;
  const Spec& spec = *call.first_spec;
  const c10::Device device = given.toDevice();
  if (is_own_device(device, spec.mesh)) return;
  if (call.traits.name != "aten::_to_copy") {
    throw std::invalid_argument(
        fmt::format("{}: {} would give a tensor on {}, where its mesh is not; leave the device out, or call it on "
                    "to_local(x) for a plain tensor",
                    call.traits.name, to_string(spec), device.str()));
  }
  throw std::invalid_argument(fmt::format(
      "to: {} would go to {}, where its mesh is not; redistribute_to(x, mesh) goes to a mesh on another device, and "
      "full_tensor(x).to(device) gives the whole value as a plain tensor",
      to_string(spec), device.str()));
}

// In training, norms write their running statistics, which their schemas do not declare: the update of a gathered copy
// would be lost.
void refuse_cut_statistics(const Call& call) {
  const auto training = call.op.schema().argumentIndexWithName("training");
  if (training && !call.arg(static_cast<std::size_t>(*training)).toBool()) return;
  if (call.traits.rule_name.ends_with("_no_training")) return;
  for (const TensorArg& entry : call.tensors) {
    const std::string& argument = call.op.schema().arguments()[entry.arg].name();
    if (argument != "running_mean" && argument != "running_var") continue;
    if (entry.spec == nullptr || all_replicate(entry.spec->placements)) continue;
    throw std::invalid_argument(fmt::format("{}: {} is {}, and could not be updated; redistribute it to Replicate",
                                            call.traits.name, argument, to_string(*entry.spec)));
  }
}

void refuse_written(const Call& call) {
  for (const TensorArg& entry : call.tensors) {
    if (!call.writes(entry) || !entry.tensor->defined()) continue;
    if (entry.spec == nullptr || !detail::is_dtensor(*entry.tensor)) {
      throw std::invalid_argument(
          fmt::format("{}: a plain tensor [{}] would be written with the value of a DTensor, {}; make it a DTensor, by "
                      "zeros_like or new_zeros of one, tessera::zeros or distribute_tensor, or write full_tensor of "
                      "the value{}",
                      call.traits.name, fmt::join(entry.tensor->sizes(), ", "), to_string(*call.first_spec),
                      old_state_hint(call, *entry.tensor)));
    }
    if (call.traits.random && entry.spec->partial) {
      throw std::invalid_argument(fmt::format(
          "{}: random numbers cannot be drawn into a pending reduction, {}; redistribute to Replicate or Shard first",
          call.traits.name, to_string(*entry.spec)));
    }
  }
}

}  // namespace

void refuse_unsupported(const Call& call) {
  if (call.traits.changes_shape_in_place) {
    throw std::invalid_argument(
        fmt::format("{}: a DTensor cannot change its shape or storage in place ({}); make another one, by narrow, cat, "
                    "view or distribute_tensor",
                    call.traits.name, to_string(*call.first_spec)));
  }
  refuse_other_layouts(call);
  refuse_another_device(call);
  refuse_cut_statistics(call);
  refuse_written(call);
}

}  // namespace tessera::dispatch
