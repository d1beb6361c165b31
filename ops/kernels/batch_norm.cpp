// Writes batch norms in training, where ranks share the batch, so that the statistics are those of the whole batch.
// They consist of in operators on DTensors; pending statistics are reduced over the mesh dimensions that cut the batch
// or the spatial dimensions.

#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/call.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/ops/kernels/arguments.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Returns `t` without pending reductions, by one all_reduce on each mesh dimension that has one.
at::Tensor reduced(const at::Tensor& t) {
  if (!detail::is_dtensor(t) || !detail::meta(t).spec->partial) return t;
  detail::implicit_communication("batch_norm",
                                 [&] { return fmt::format("; statistics of a batch, {}", to_string(t)); });
  return redistribute(t, without_partial(detail::meta(t).spec->placements));
}

// Gives the arguments of one call by name.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack) : op_(op), args_(take_args(op, stack)) {}

  const at::IValue& operator[](const char* name) const { return args_[static_cast<std::size_t>(argument(op_, name))]; }
  at::Tensor tensor(const char* name) const {
    return argument(op_, name) >= 0 && (*this)[name].isTensor() ? (*this)[name].toTensor() : at::Tensor();
  }
  bool any_spread() const { return tessera::any_spread(args_); }

 private:
  const c10::OperatorHandle& op_;
  Stack args_;
};

// Holds a tensor of (batch, channels, spatial dimensions...) and the shape in which a tensor of channels broadcasts to
// it.
struct Batch {
  at::Tensor x;                // in single precision or wider
  std::vector<int64_t> dims;   // all but the channels
  std::vector<int64_t> shape;  // of a tensor of channels, so that it broadcasts to x
  double count;                // elements per channel

  at::Tensor over(const at::Tensor& channels) const { return channels.view(shape); }
};

Batch read_batch(const at::Tensor& input) {
  Batch out{.x = widened(input),
            .dims = {0},
            .shape = std::vector<int64_t>(static_cast<std::size_t>(input.dim()), 1),
            .count = 1};
  out.shape[1] = input.size(1);
  for (int64_t d = 2; d < input.dim(); ++d) out.dims.push_back(d);
  for (const int64_t d : out.dims) out.count *= static_cast<double>(input.size(d));
  return out;
}

// Returns a statistic of the batch in the layout of the running one; a plain running statistic is whole on every rank.
at::Tensor laid_as(const at::Tensor& running, const at::Tensor& batch) {
  if (!running.defined() || !is_dtensor(batch)) return batch;
  const bool plain = !is_dtensor(running);
  const Placements target = plain ? Placements(placements_of(batch).size(), Replicate()) : placements_of(running);
  if (route_between(spec_of(batch), target)->communicates()) {
    detail::implicit_communication("batch_norm", [&] {
      return fmt::format("; the statistics of the batch are {}, the running ones {}", to_string(batch),
                         plain ? "plain tensors" : to_string(running));
    });
  }
  const at::Tensor out = redistribute(batch, target);
  return plain ? to_local(out) : out;
}

void update(const at::Tensor& running, const at::Tensor& batch, double momentum) {
  if (!running.defined()) return;
  if (const at::Tensor precise = widened(running); precise.scalar_type() != running.scalar_type()) {
    running.copy_(precise.mul(1 - momentum).add_(widened(batch), momentum));  // a variance of 16 bits may overflow
  } else {
    running.mul_(1 - momentum).add_(batch.to(running.scalar_type()), momentum);
  }
}

// Throws where LibTorch does, or would read memory that is not there: a tensor of channels has one element per
// channel, and the running statistics are there unless the batch's are used.
void check_channels(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                    const std::optional<at::Tensor>& running_var, bool training) {
  const std::pair<const char*, const std::optional<at::Tensor>&> given[] = {
      {"weight", weight}, {"bias", bias}, {"running_mean", running_mean}, {"running_var", running_var}};
  const at::ScalarType type = input.scalar_type();
  if (!at::isFloatingType(type)) {
    throw std::invalid_argument(
        fmt::format("batch_norm: the input is of {}; give a floating dtype", c10::toString(type)));
  }
  const bool half = has_16_bits(type);
  for (const auto& [name, t] : given) {
    const bool is_there = t && t->defined();
    if (is_there && t->scalar_type() != type && !(half && t->scalar_type() == at::kFloat)) {
      throw std::invalid_argument(fmt::format("batch_norm: {} is of {}, the input of {}; give one dtype{}", name,
                                              c10::toString(t->scalar_type()), c10::toString(type),
                                              half ? ", or Float beside the input" : ""));
    }
    if (is_there && t->numel() != input.size(1)) {
      throw std::invalid_argument(
          fmt::format("batch_norm: {} has {} elements; the input, of sizes [{}], has {} channels", name, t->numel(),
                      fmt::join(input.sizes(), ", "), input.size(1)));
    }
    if (!is_there && !training && std::string_view(name).starts_with("running")) {
      throw std::invalid_argument(
          fmt::format("batch_norm: {} is not defined; give it, or normalize by the batch (training)", name));
    }
  }
}

// (input, weight, bias, running mean, running variance, training, momentum, eps) -> (result, mean, inverse deviation)
bool forward(const c10::OperatorHandle& op, Stack& stack) {
  const Arguments args(op, stack);
  const at::Tensor input = args.tensor("input");
  const at::Tensor running_mean = args.tensor("running_mean");
  if (argument(op, "out") >= 0 || !args.any_spread() || !args["training"].toBool() || input.dim() < 2 ||
      input.numel() == 0)
    return false;
  check_channels(input, args.tensor("weight"), args.tensor("bias"), running_mean, args.tensor("running_var"), true);
  const Batch batch = read_batch(input);
  const at::Tensor mean = reduced(at::mean(batch.x, batch.dims));
  const at::Tensor centered = batch.x - batch.over(mean);
  const at::Tensor variance = reduced(at::mean(centered * centered, batch.dims));
  const at::Tensor scale = at::rsqrt(variance + args["eps"].toDouble());
  at::Tensor out = centered * batch.over(scale);
  if (const at::Tensor weight = args.tensor("weight"); weight.defined()) out = out * batch.over(widened(weight));
  if (const at::Tensor bias = args.tensor("bias"); bias.defined()) out = out + batch.over(widened(bias));
  const double momentum = args["momentum"].toDouble();
  // Both are computed before either is written.
  const at::Tensor running_var = args.tensor("running_var");
  const at::Tensor of_mean = laid_as(running_mean, mean);
  const at::Tensor of_variance = laid_as(running_var, variance * (batch.count / (batch.count - 1)));
  update(running_mean, of_mean, momentum);
  update(running_var, of_variance, momentum);
  give(op, stack, Stack{out.to(input.scalar_type()), mean, scale});
  return true;
}

// Leaves the backward of a norm to LibTorch. Its kernel for CPUs computes wrong gradients for some tensors of which not
// both are row-major, or both channels-last (LibTorch 2.11), such as the gradient of a result that was transposed.
bool left_to_libtorch(const c10::OperatorHandle& op, Stack& stack) {
  const std::size_t first = stack.size() - op.schema().arguments().size();
  const auto tensor = [&](const char* name) -> at::IValue& {
    return stack[first + static_cast<std::size_t>(argument(op, name))];
  };
  const at::Tensor input = tensor("input").toTensor();
  if (input.is_cuda()) return false;
  const at::MemoryFormat format = input.suggest_memory_format();
  for (const char* name : {"grad_out", "input"}) tensor(name) = tensor(name).toTensor().contiguous(format);
  return false;
}

// Maps (grad, input, weight, running mean, running variance, mean, inverse deviation, train, eps, output_mask) to the
// gradients of input, weight and bias.
bool backward(const c10::OperatorHandle& op, Stack& stack) {
  const Arguments args(op, stack);
  const at::Tensor input = args.tensor("input");
  if (writes(op) || !args.any_spread() || input.dim() < 2 || input.numel() == 0) return left_to_libtorch(op, stack);
  const bool train = args["train"].toBool();
  const auto wanted = args["output_mask"].toBoolList();
  const Batch batch = read_batch(input);
  const at::Tensor grad = widened(args.tensor("grad_out"));
  const at::Tensor mean = train ? args.tensor("save_mean") : widened(args.tensor("running_mean"));
  const at::Tensor scale =
      train ? args.tensor("save_invstd") : at::rsqrt(widened(args.tensor("running_var")) + args["eps"].toDouble());
  const at::Tensor normal = (batch.x - batch.over(mean)) * batch.over(scale);
  // Both sums are reduced in one collective.
  const at::Tensor sums = reduced(at::stack({at::sum(grad, batch.dims), at::sum(grad * normal, batch.dims)}));
  const at::Tensor of_bias = sums.select(0, 0);
  const at::Tensor of_weight = sums.select(0, 1);
  at::Tensor of_input = grad;
  if (train) of_input = grad - (batch.over(of_bias) + normal * batch.over(of_weight)) / batch.count;
  const at::Tensor weight = args.tensor("weight");
  of_input = of_input * batch.over(weight.defined() ? scale * widened(weight) : scale);
  const at::ScalarType of_parameters = weight.defined() ? weight.scalar_type() : input.scalar_type();
  give(op, stack,
       Stack{wanted.get(0) ? of_input.to(input.scalar_type()) : at::Tensor(),
             wanted.get(1) ? of_weight.to(of_parameters) : at::Tensor(),
             wanted.get(2) ? of_bias.to(of_parameters) : at::Tensor()});
  return true;
}

// A batch norm by given statistics on a GPU, whose kernel refuses a piece without elements.
void norm_by_statistics(const LocalCall& call, Stack& stack) {
  const at::Tensor input = stack[0].toTensor();
  if (input.numel() > 0) return call.op.callBoxed(stack);
  const std::size_t mean = static_cast<std::size_t>(argument(call.op, "running_mean"));
  const double eps = stack[static_cast<std::size_t>(argument(call.op, "eps"))].toDouble();
  const at::Tensor variance = widened(stack[mean + 1].toTensor());
  stack.assign({at::empty_like(input), widened(stack[mean].toTensor()).clone(), at::rsqrt(variance + eps)});
}

// LibTorch picks a kernel here; we always pick the one above, on GPUs too.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t> choose(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, bool training,
    double momentum, double eps, bool /*cudnn_enabled*/) {
  check_channels(input, weight, bias, running_mean, running_var, training);
  auto [out, mean, scale] =
      at::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps);
  return {out, mean, scale, at::empty({0}, at::TensorOptions(at::kByte).device(input.device())), 0};
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { m.impl("_batch_norm_impl_index", choose); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { m.impl("_batch_norm_impl_index", choose); }

// ---- the same norm by its newer names, which return a fourth tensor, reserved for a kernel that is not used here

// Holds the out= tensors of a call, which are its last arguments, one for each result.
class Outs {
 public:
  Outs(const c10::OperatorHandle& op, const Stack& stack) : op_(op) {
    const Stack args = take_args(op, stack);
    tensors_.assign(args.end() - static_cast<std::ptrdiff_t>(op.schema().returns().size()), args.end());
  }
  // Throws if a result of these sizes would be written to a tensor of others, or to one that does not lie as the result
  // of `input` does: on its mesh, or plain.
  void check(const at::Tensor& input, const std::vector<std::vector<int64_t>>& sizes) const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const at::Tensor& out = tensors_[i].toTensor();
      if (out.numel() > 0 && !is_dtensor(input) && is_dtensor(out)) {
        throw std::invalid_argument(fmt::format(
            "{}: the input is a plain tensor, and result {} would be written to {}; make the input a DTensor",
            op_.schema().name(), i, to_string(out)));
      }
      if (out.numel() > 0 && is_dtensor(input) && !(is_dtensor(out) && mesh_of(out) == mesh_of(input))) {
        throw std::invalid_argument(fmt::format(
            "{}: result {} would be written to {}; give a DTensor of the input's mesh, {}", op_.schema().name(), i,
            is_dtensor(out) ? to_string(out) : "a plain tensor", mesh_of(input).to_string()));
      }
      if (out.sizes() != at::IntArrayRef(sizes[i])) dispatch::refuse_sizes(op_.schema().name(), sizes[i], out.sizes());
    }
  }
  Stack written(const at::Tensor& input, const Stack& results) const {
    std::vector<std::vector<int64_t>> sizes;
    for (const at::IValue& result : results) sizes.push_back(result.toTensor().sizes().vec());
    check(input, sizes);
    for (std::size_t i = 0; i < results.size(); ++i) {
      // The reserved tensor is a plain one without elements.
      if (const at::Tensor& result = results[i].toTensor(); result.numel() > 0) tensors_[i].toTensor().copy_(result);
    }
    return tensors_;
  }

 private:
  const c10::OperatorHandle& op_;
  Stack tensors_;
};

// The arguments are (input, weight, bias, running mean, running variance, momentum, eps). The variant with an update
// trains; the others use the running statistics. With out= this runs for every layout: cuDNN's kernel, which LibTorch
// would call, is not reached.
bool without_training_argument(const c10::OperatorHandle& op, Stack& stack) {
  const Arguments args(op, stack);
  const bool has_out = op.schema().overload_name() == "out";
  if (!has_out && !args.any_spread()) return false;
  const at::Tensor input = args.tensor("input");
  const bool training = op.schema().name() == "aten::_batch_norm_with_update";
  check_channels(input, args.tensor("weight"), args.tensor("bias"), args.tensor("running_mean"),
                 args.tensor("running_var"), training);
  if (has_out && training) {  // before the running statistics are written
    const std::vector<int64_t> channels = {input.size(1)};
    Outs(op, stack).check(input, {input.sizes().vec(), channels, channels, {0}});
  }
  const auto [out, mean, scale] =
      at::native_batch_norm(input, args.tensor("weight"), args.tensor("bias"), args.tensor("running_mean"),
                            args.tensor("running_var"), training, args["momentum"].toDouble(), args["eps"].toDouble());
  const Stack results = {out, mean, scale, at::empty({0}, at::TensorOptions(at::kByte).device(out.device()))};
  give(op, stack, has_out ? Outs(op, stack).written(input, results) : results);
  return true;
}

// Computes their backward. `update` says whether the call was in training.
bool backward_without_training_argument(const c10::OperatorHandle& op, Stack& stack) {
  const Arguments args(op, stack);
  if (writes(op) || !args.any_spread()) return left_to_libtorch(op, stack);
  const auto wanted = args["output_mask"].toBoolList();
  const auto [of_input, of_weight, of_bias] = at::native_batch_norm_backward(
      args.tensor("grad_out"), args.tensor("input"), args.tensor("weight"), args.tensor("running_mean"),
      args.tensor("running_var"), args.tensor("save_mean"), args.tensor("save_var"), args["update"].toBool(),
      args["eps"].toDouble(), {wanted.get(0), wanted.get(1), wanted.get(2)});
  give(op, stack, Stack{of_input, of_weight, of_bias});
  return true;
}

[[maybe_unused]] const bool kRegistered = [] {
  for (const char* name : {"native_batch_norm", "_native_batch_norm_legit"}) register_decomposition(name, forward);
  register_decomposition("native_batch_norm_backward", backward);
  for (const char* name : {"_batch_norm_with_update", "_batch_norm_no_update"}) {
    register_decomposition(name, without_training_argument);
  }
  register_decomposition("batch_norm_backward", backward_without_training_argument);
  register_local_kernel("norm_by_statistics", norm_by_statistics);
  return true;
}();

}  // namespace
}  // namespace tessera
