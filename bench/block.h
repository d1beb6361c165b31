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

// These declarations are the transformer block that several benchmarks measure: norm, attention, norm, MLP of four
// times the features. Activations are [sequence, batch, hidden], and each head's queries, keys and values are adjacent,
// as in Megatron.
namespace tessera::bench {

struct BlockSize {
  int64_t hidden = 256;
  int64_t sequence = 128;
  int64_t batch = 1;
  int64_t heads = 4;

  int64_t head_size() const { return hidden / heads; }
  // text() returns "256 128 1 4" for the defaults. parse() reads such text; it throws std::invalid_argument on other
  // text.
  std::string text() const;
  static BlockSize parse(const std::string& text);
};

// Describes a parameter of the block. All implementations of the block have the same parameters.
struct BlockParameter {
  const char* name;
  std::vector<int64_t> sizes;  // of the global tensor
  int64_t cut_dim;             // the tensor dimension that is sharded; -1 for none
};
std::vector<BlockParameter> block_parameters(const BlockSize& size);

// Computes a tensor of `sizes` by a formula, so that every process gets the same one: numbers around 0 with standard
// deviation `scale`. tp_block_peer.py has the same formula.
at::Tensor numbers(const std::vector<int64_t>& sizes, int64_t seed, double scale);
// Returns the values of the `index`th parameter.
at::Tensor block_values(const BlockParameter& parameter, int64_t index);
// Returns this rank's piece of `whole`.
at::Tensor piece_of(const at::Tensor& whole, int64_t cut_dim, const DeviceMesh& mesh);

// Computes attention, [sequence, batch, 3 * features] -> [sequence, batch, features], of DTensors or of one rank's
// heads.
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

// PlainBlock is plain torch::nn; styles parallelize it.
using PlainBlock = BlockOf<torch::nn::Linear, torch::nn::Linear>;
std::shared_ptr<PlainBlock> plain_block(const BlockSize& size, at::ScalarType dtype = at::kFloat);
// LayersBlock consists of named layers, which are sharded themselves.
using LayersBlock = BlockOf<ColumnParallelLinear, RowParallelLinear>;
std::shared_ptr<LayersBlock> layers_block(const BlockSize& size, const DeviceMesh& mesh,
                                          const ModelParallelConfig& config = {});

// Gives the block's parameters their values.
void fill_block(torch::nn::Module& block, const BlockSize& size, const DeviceMesh& mesh);

}  // namespace tessera::bench
