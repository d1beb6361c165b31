#include "tessera/bench/block.h"

#include <cmath>
#include <sstream>
#include <stdexcept>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/partition.h"

namespace tessera::bench {

std::string BlockSize::text() const { return fmt::format("{} {} {} {}", hidden, sequence, batch, heads); }

BlockSize BlockSize::parse(const std::string& text) {
  BlockSize out;
  std::istringstream in(text);
  if (!(in >> out.hidden >> out.sequence >> out.batch >> out.heads)) {
    throw std::invalid_argument(fmt::format("\"{}\" is not HIDDEN SEQUENCE BATCH HEADS", text));
  }
  return out;
}

std::vector<BlockParameter> block_parameters(const BlockSize& size) {
  const int64_t h = size.hidden;
  return {{"norm1.weight", {h}, -1}, {"norm1.bias", {h}, -1},        {"qkv.weight", {3 * h, h}, 0},
          {"qkv.bias", {3 * h}, 0},  {"out.weight", {h, h}, 1},      {"out.bias", {h}, -1},
          {"norm2.weight", {h}, -1}, {"norm2.bias", {h}, -1},        {"up.weight", {4 * h, h}, 0},
          {"up.bias", {4 * h}, 0},   {"down.weight", {h, 4 * h}, 1}, {"down.bias", {h}, -1}};
}

at::Tensor numbers(const std::vector<int64_t>& sizes, int64_t seed, double scale) {
  const at::Tensor places = at::arange(c10::multiply_integers(sizes), at::kLong);
  const at::Tensor even = places.mul(2654435761).add(7919 * seed).remainder(1009).sub(504).to(at::kDouble).div(291.0);
  return even.mul(scale).to(at::kFloat).view(sizes);
}

at::Tensor block_values(const BlockParameter& parameter, int64_t index) {
  const double scale = parameter.sizes.size() == 2 ? 1 / std::sqrt(static_cast<double>(parameter.sizes[1])) : 0.1;
  return numbers(parameter.sizes, index, scale);
}

at::Tensor piece_of(const at::Tensor& whole, int64_t cut_dim, const DeviceMesh& mesh) {
  if (cut_dim < 0) return whole.clone();
  const Interval mine = chunk_range(whole.size(cut_dim), mesh.size(), mesh.local_rank(0));
  return whole.narrow(cut_dim, mine.begin, mine.size()).clone();
}

at::Tensor attend(const at::Tensor& qkv, int64_t head_size) {
  const int64_t s = qkv.size(0), b = qkv.size(1), features = qkv.size(2) / 3;
  const std::vector<at::Tensor> parts =
      qkv.view({s, b, features / head_size, 3 * head_size}).permute({1, 2, 0, 3}).chunk(3, -1);
  const double scale = 1 / std::sqrt(static_cast<double>(head_size));
  const at::Tensor weights = at::softmax(at::matmul(parts[0] * scale, parts[1].transpose(-2, -1)), -1);
  return at::matmul(weights, parts[2]).permute({2, 0, 1, 3}).reshape({s, b, features});
}

std::shared_ptr<PlainBlock> plain_block(const BlockSize& size, at::ScalarType dtype) {
  const int64_t h = size.hidden;
  const auto linear = [](int64_t in, int64_t out) { return torch::nn::Linear(in, out); };
  auto out = std::make_shared<PlainBlock>(size, linear(h, 3 * h), linear(h, h), linear(h, 4 * h), linear(4 * h, h));
  out->to(dtype);
  return out;
}

std::shared_ptr<LayersBlock> layers_block(const BlockSize& size, const DeviceMesh& mesh,
                                          const ModelParallelConfig& config) {
  const int64_t h = size.hidden;
  const auto column = [&](int64_t in, int64_t out) {
    ColumnParallelOptions options(in, out);
    options.config = config;
    return ColumnParallelLinear(options, mesh);
  };
  const auto row = [&](int64_t in, int64_t out) {
    RowParallelOptions options(in, out);
    options.input_is_parallel = true;
    options.config = config;
    return RowParallelLinear(options, mesh);
  };
  auto out = std::make_shared<LayersBlock>(size, column(h, 3 * h), row(h, h), column(h, 4 * h), row(4 * h, h));
  out->to(config.params_dtype);
  return out;
}

void fill_block(torch::nn::Module& block, const BlockSize& size, const DeviceMesh& mesh) {
  const c10::AutoGradMode no_gradients(false);
  const auto parameters = block.named_parameters();
  int64_t index = 0;
  for (const BlockParameter& each : block_parameters(size)) {
    const at::Tensor& parameter = parameters[each.name];
    const at::Tensor values = block_values(each, index++);
    if (is_dtensor(parameter)) {
      to_local(parameter).copy_(piece_of(values, each.cut_dim, mesh));
    } else {
      parameter.copy_(values);
    }
  }
}

}  // namespace tessera::bench
