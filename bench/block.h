#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "tessera/layers/parallel_linear.h"
#include "tessera/mesh/device_mesh.h"

// A transformer block as several benchmarks measure it: norm, attention, norm, MLP of four times the features;
// activations lie [sequence, batch, hidden], and each head's queries, keys and values beside each other, as Megatron
// has it.
namespace tessera::bench {

struct BlockSize {
  int64_t hidden = 256;
  int64_t sequence = 128;
  int64_t batch = 1;
  int64_t heads = 4;

  int64_t head_size() const { return hidden / heads; }
  // "256 128 1 4"; back: throws std::invalid_argument.
  std::string text() const;
  static BlockSize parse(const std::string& text);
};

// A parameter of the block, the same in every way of writing it.
struct BlockParameter {
  const char* name;
  std::vector<int64_t> sizes;  // the whole's
  int64_t cut_dim;             // that the ranks divide; -1: none
};
std::vector<BlockParameter> block_parameters(const BlockSize& size);

// A tensor of `sizes` by formula, so that every process has it: numbers around 0 of deviation `scale`. As in
// tp_block_peer.py.
at::Tensor numbers(const std::vector<int64_t>& sizes, int64_t seed, double scale);
// The values of the `index`th parameter.
at::Tensor block_values(const BlockParameter& parameter, int64_t index);
// A rank's part of them.
at::Tensor piece_of(const at::Tensor& whole, int64_t cut_dim, const DeviceMesh& mesh);

// Attention of [sequence, batch, 3 * features] -> [sequence, batch, features]: of DTensors, or of one rank's heads.
at::Tensor attend(const at::Tensor& qkv, int64_t head_size);

template <class Column, class Row>
struct BlockOf : torch::nn::Module {
  BlockOf(const BlockSize& size, Column qkv_layer, Row out_layer, Column up_layer, Row down_layer)
      : head_size(size.head_size()),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size.hidden})))),
        qkv(register_module("qkv", qkv_layer)),
        out(register_module("out", out_layer)),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size.hidden})))),
        up(register_module("up", up_layer)),
        down(register_module("down", down_layer)) {}

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor middle = x + out->forward(attend(qkv->forward(norm1->forward(x)), head_size));
    return middle + down->forward(at::gelu(up->forward(norm2->forward(middle))));
  }

  const int64_t head_size;
  torch::nn::LayerNorm norm1;
  Column qkv;
  Row out;
  torch::nn::LayerNorm norm2;
  Column up;
  Row down;
};

// Ordinary torch::nn, to be given styles.
using PlainBlock = BlockOf<torch::nn::Linear, torch::nn::Linear>;
std::shared_ptr<PlainBlock> plain_block(const BlockSize& size, at::ScalarType dtype = at::kFloat);
// Of the layers that are cut themselves.
using LayersBlock = BlockOf<ColumnParallelLinear, RowParallelLinear>;
std::shared_ptr<LayersBlock> layers_block(const BlockSize& size, const DeviceMesh& mesh,
                                          const ModelParallelConfig& config = {});

// Gives the block's parameters their values.
void fill_block(torch::nn::Module& block, const BlockSize& size, const DeviceMesh& mesh);

}  // namespace tessera::bench
