#include "tessera/bench/raw_block.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/dtensor/saved.h"

namespace tessera::bench {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;
using Backend = c10::intrusive_ptr<c10d::Backend>;

c10::intrusive_ptr<c10d::Work> begin_sum(const at::Tensor& tensor, const Backend& group) {
  std::vector<at::Tensor> tensors = {tensor};
  return group->allreduce(tensors, c10d::AllreduceOptions());
}

at::Tensor weight_gradient(const at::Tensor& g, const at::Tensor& x) {
  return at::mm(g.flatten(0, -2).t(), x.flatten(0, -2));
}
at::Tensor bias_gradient(const at::Tensor& g) { return g.flatten(0, -2).sum(0); }

// The weight is sharded by rows: each rank computes some features of the output, and one term of the input's gradient.
struct ColumnLinear : torch::autograd::Function<ColumnLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const Backend& group) {
    ctx->save_for_backward({x, weight});
    detail::saved<Backend>(ctx, "group") = group;
    return at::linear(x, weight, bias);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const tensor_list saved = ctx->get_saved_variables();
    const at::Tensor input_gradient = at::matmul(grads[0], saved[1]);
    const auto work = begin_sum(input_gradient, detail::saved<Backend>(ctx, "group"));
    tensor_list out = {input_gradient, weight_gradient(grads[0], saved[0]), bias_gradient(grads[0]), at::Tensor()};
    work->wait();
    return out;
  }
};

// The weight is sharded by columns: each rank computes one term of the output.
struct RowLinear : torch::autograd::Function<RowLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const Backend& group) {
    ctx->save_for_backward({x, weight});
    const at::Tensor out = at::linear(x, weight);
    begin_sum(out, group)->wait();
    return out.add_(bias);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const tensor_list saved = ctx->get_saved_variables();
    return {at::matmul(grads[0], saved[1]), weight_gradient(grads[0], saved[0]), bias_gradient(grads[0]), at::Tensor()};
  }
};

}  // namespace

RawBlock::RawBlock(const BlockSize& size, const DeviceMesh& mesh) : size_(size), mesh_(mesh) {
  int64_t index = 0;
  for (const BlockParameter& each : block_parameters(size)) {
    parameters_.push_back(piece_of(block_values(each, index++), each.cut_dim, mesh).requires_grad_());
  }
}

at::Tensor RawBlock::norm(const at::Tensor& x, std::size_t first) const {
  return at::layer_norm(x, {size_.hidden}, parameters_[first], parameters_[first + 1]);
}

at::Tensor RawBlock::forward(const at::Tensor& x) const {
  const Backend group = mesh_.group(0);
  const auto column = [&](const at::Tensor& in, std::size_t at) {
    return ColumnLinear::apply(in, parameters_[at], parameters_[at + 1], group);
  };
  const auto row = [&](const at::Tensor& in, std::size_t at) {
    return RowLinear::apply(in, parameters_[at], parameters_[at + 1], group);
  };
  const at::Tensor middle = x + row(attend(column(norm(x, 0), 2), size_.head_size()), 4);
  return middle + row(at::gelu(column(norm(middle, 6), 8)), 10);
}

}  // namespace tessera::bench
