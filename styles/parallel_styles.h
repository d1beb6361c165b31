#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/styles/style.h"

namespace tessera {

// How activations lie on the tensor dimension. What is left out is the style's default for the module; docs/styles.md
// has the table.
//   ColwiseParallel({.output_layouts = Replicate()})
struct StyleLayouts {
  std::optional<Placement> input_layouts;          // how a plain input lies; a DTensor knows it itself
  std::optional<Placement> desired_input_layouts;  // into which the input is brought
  std::optional<Placement> output_layouts;         // into which the output is brought
  // The output is a plain tensor, this rank's piece. Default false, unlike PyTorch: see docs/styles.md.
  bool use_local_output = false;
  // Of a Linear's columns: an input that had to be gathered is not kept whole for backward, but gathered there once
  // more, as Megatron's sequence parallelism has it: 1 / ranks of the bytes, for one more all_gather.
  bool gather_input_again = false;
};

// Cuts the columns of a Linear's weight as the formula x W^T + b sees it, that is its output features, or an
// Embedding's embedding_dim: each rank computes its features of the output.
//   Linear     weight S(0), bias S(0)   input R     -> output S(-1)
//   Conv1D     weight S(1), bias S(0)   input R     -> output S(-1)     (GPT-2's linear layer: see ModuleKind::kConv1D)
//   Embedding  weight S(1)              indices R   -> output S(-1)
//   MultiheadAttention                  inputs R    -> output R
//     Each rank has whole heads, of n ranks with h heads of d features h / n each: in_proj_weight and in_proj_bias,
//     which hold
//     queries, keys and values, BC(0, h * d / n); q, k, v_proj_weight S(0); bias_k, bias_v S(2); out_proj.weight S(1),
//     out_proj.bias R. Where n does not divide h, by torch.chunk's rule over heads: lists of intervals, and ragged
//     sizes.
// With other output_layouts than Shard(-1) a Linear's bias is replicated: it is added to an output that has been
// brought there. Communication, forward: none for the default layouts, but one all_reduce of an attention's output;
// backward of a Linear: one all_reduce of the input's gradient, of an attention one for each different input. With an
// input_layouts of Shard(d) the all_reduce is a reduce_scatter, and forward has one all_gather, backward another with
// gather_input_again. Throws std::invalid_argument on every other module, naming its path and type; on an Embedding
// with max_norm; on an attention with other input_layouts than Replicate(); on gather_input_again of another module
// than a Linear or a Conv1D; on a traced MultiheadAttention whose code does not say how many heads it has.
// Source of the layouts: torch.distributed.tensor.parallel, as of PyTorch 2.11; so for all styles here.
class ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(StyleLayouts layouts = {}) : layouts_(layouts) {}
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "ColwiseParallel"; }
  std::string to_string() const override;

 private:
  StyleLayouts layouts_;
};

// Cuts a Linear's input features, or an Embedding's rows (its vocabulary): each rank computes a term of the output.
//   Linear     weight S(1), bias R      input S(-1) -> output R
//   Conv1D     weight S(0), bias R      input S(-1) -> output R
//   Embedding  weight S(0)              indices R   -> output R
// The bias is added once, after the reduction.
// Communication, forward: one all_reduce of the output, or one reduce_scatter where output_layouts is a Shard.
// Throws as ColwiseParallel does, and on gather_input_again.
class RowwiseParallel : public ParallelStyle {
 public:
  explicit RowwiseParallel(StyleLayouts layouts = {}) : layouts_(layouts) {}
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "RowwiseParallel"; }
  std::string to_string() const override;

 private:
  StyleLayouts layouts_;
};

struct SequenceOptions {
  bool use_local_output = false;
};

// Keeps a norm's parameters whole and its activations cut along `sequence_dim`: input S(sequence_dim) -> output
// S(sequence_dim). A plain input is this rank's piece of the sequence, of one size on all ranks (uneven ones come in as
// from_local(piece, mesh, placements, {.shape = ...})); a DTensor laid out otherwise is redistributed.
//
// For torch::nn::LayerNorm, GroupNorm, and any module of your own whose parameters go to at::layer_norm, group_norm or
// rms_norm. A norm that multiplies by its weight itself takes a DTensor by the operators' own rules and refuses a plain
// piece. On a module without parameters, such as Dropout, the style does nothing: the activation's own layout goes
// through. Throws std::invalid_argument on a Linear, an Embedding, and a container whose parameters belong to its
// children.
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

}  // namespace tessera
