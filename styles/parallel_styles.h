#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/placement/placement.h"
#include "tessera/styles/style.h"

namespace tessera {

// Says how activations are laid out on the tensor dimension. A member left out has the style's default for the module;
// docs/styles.md has the table.
//   ColwiseParallel({.output_layouts = Replicate()})
struct StyleLayouts {
  std::optional<Placement> input_layouts;          // the layout of a plain input; a DTensor has its own
  std::optional<Placement> desired_input_layouts;  // the input is redistributed to this
  std::optional<Placement> output_layouts;         // the output is redistributed to this
  // true: the output is a plain tensor, this rank's piece. Unlike PyTorch's, the default is false: see docs/styles.md.
  bool use_local_output = false;
  // For ColwiseParallel of a Linear or Conv1D: an input that had to be gathered is not kept whole for backward but
  // gathered again there, as in Megatron's sequence parallelism. It keeps 1 / ranks of the bytes, for one more
  // all_gather.
  bool gather_input_again = false;
};

// Shards a Linear's output features (the columns of W^T in x W^T + b) or an Embedding's embedding_dim, so that each
// rank computes its own features of the output.
//   Linear     weight S(0), bias S(0)   input R     -> output S(-1)
//   Conv1D     weight S(1), bias S(0)   input R     -> output S(-1)     (GPT-2's linear layer: see ModuleKind::kConv1D)
//   Embedding  weight S(1)              indices R   -> output S(-1)
//   MultiheadAttention                  inputs R    -> output R
//     Each of n ranks has h / n of the h heads, of d features each:
//       in_proj_weight, in_proj_bias (queries, keys, values)   BC(0, h * d / n)
//       q_proj_weight, k_proj_weight, v_proj_weight            S(0)
//       bias_k, bias_v                                         S(2)
//       out_proj.weight                                        S(1)
//       out_proj.bias                                          R
//     Where n does not divide h, heads are split as torch.chunk splits them, and the placements are lists of intervals
//     and ragged sizes.
// With output_layouts other than Shard(-1) a Linear's bias is replicated, and added to the output after it was
// redistributed.
// Communication in forward: none with the default layouts, except for one all_reduce of an attention's output.
// Communication in backward: one all_reduce of a Linear's input gradient; for an attention, one per different input.
// With input_layouts Shard(d) that all_reduce is a reduce_scatter, and forward has one all_gather; with
// gather_input_again backward has another one. Layers that take the same DTensor so cut, while autograd keeps what the
// first has gathered, have one all_gather and one reduce_scatter together.
// Throws std::invalid_argument on any other module, naming its path and type; on an Embedding with max_norm; on an
// attention with input_layouts other than Replicate(); on gather_input_again for a module that is no Linear or Conv1D;
// on a traced MultiheadAttention whose code does not say how many heads it has.
// Source of the layouts of all styles here: torch.distributed.tensor.parallel of PyTorch 2.11.
class ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(StyleLayouts layouts = {}) : layouts_(std::move(layouts)) {}
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "ColwiseParallel"; }
  std::string to_string() const override;

 private:
  StyleLayouts layouts_;
};

// Shards a Linear's input features, or an Embedding's rows (its vocabulary), so that each rank computes one term of the
// sum that is the output.
//   Linear     weight S(1), bias R      input S(-1) -> output R
//   Conv1D     weight S(0), bias R      input S(-1) -> output R
//   Embedding  weight S(0)              indices R   -> output R
// The bias is added once, after the reduction. Communication in forward: one all_reduce of the output, or one
// reduce_scatter where output_layouts is a Shard. Throws as ColwiseParallel does, and on gather_input_again.
class RowwiseParallel : public ParallelStyle {
 public:
  explicit RowwiseParallel(StyleLayouts layouts = {}) : layouts_(std::move(layouts)) {}
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "RowwiseParallel"; }
  std::string to_string() const override;

 private:
  StyleLayouts layouts_;
};

struct SequenceOptions {
  bool use_local_output = false;
};

// Keeps a norm's parameters whole and its activations sharded along `sequence_dim`: input S(sequence_dim) -> output
// S(sequence_dim). A plain input is this rank's piece of the sequence, of the same size on all ranks (for uneven pieces
// give from_local(piece, mesh, placements, {.shape = ...})). A DTensor with another layout is redistributed.
//
// It applies to torch::nn::LayerNorm, GroupNorm, and any module of your own that passes its parameters to
// at::layer_norm, group_norm or rms_norm. A norm whose code multiplies by the weight itself follows the operators' own
// rules for a DTensor, and refuses a plain piece. On a module without parameters, such as Dropout, the style does
// nothing: the activation keeps its layout.
// Throws std::invalid_argument on a Linear, a Conv1D, an Embedding, a MultiheadAttention, and a container whose
// parameters belong to its children.
class SequenceParallel : public ParallelStyle {
 public:
  explicit SequenceParallel(int64_t sequence_dim = 1, SequenceOptions options = {})
      : sequence_dim_(sequence_dim), options_(options) {}
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "SequenceParallel"; }
  std::string to_string() const override;

 private:
  int64_t sequence_dim_;
  SequenceOptions options_;
};

// Lays out a module's own parameters and buffers as it is told, and says nothing about activations: operators follow
// their rules, and a plain tensor beside such a parameter counts as replicated. It is for modules that the other styles
// do not know, such as Conv2d, Bilinear and modules with parameters of their own:
//   {"experts", PlaceParameters({{"up", Shard(0)}, {"down", Shard(0)}})}
// Parameters that are not named are replicated. Communication: what the operators' rules need.
// Throws std::invalid_argument on a name that the module does not have or that is given twice, on none, and on a
// placement that a parameter cannot have.
class PlaceParameters : public ParallelStyle {
 public:
  using Named = std::vector<std::pair<std::string, Placement>>;
  explicit PlaceParameters(Named placements) : placements_(std::move(placements)) {}
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "PlaceParameters"; }
  std::string to_string() const override;

 private:
  Named placements_;
};

}  // namespace tessera
