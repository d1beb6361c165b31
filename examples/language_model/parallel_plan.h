#pragma once

#include <cstdint>
#include <string>

#include "tessera/examples/language_model/transformer.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/styles/parallelize.h"

// Says how the model of transformer.h is cut over a mesh dimension called tp: attention by heads, the two layers after
// it by their inner features, the embedding, the head and with it the logits by the vocabulary.

// Cuts a projection into attention's heads, or out of them. Every rank has whole heads: it computes attention, and
// caches keys and values, without communication. Where the ranks do not divide the heads, heads are dealt as
// torch.chunk would: 4 heads over 3 ranks are 2, 2 and 0. ColwiseParallel and RowwiseParallel would cut features there,
// and with them heads.
//   to heads     weight S(0), bias S(0)   input R      -> output S(-1)
//   from heads   weight S(1), bias R      input S(-1)  -> output R, by one all_reduce
class HeadParallel : public tessera::ParallelStyle {
 public:
  enum class Side { kToHeads, kFromHeads };

  HeadParallel(Side side, const TransformerOptions& options) : side_(side), options_(options) {}

  void apply(tessera::ApplyContext& context) const override {
    const int64_t ranks = context.mesh().size(context.tensor_dim());
    const bool to_heads = side_ == Side::kToHeads;
    context.place("weight", heads_on(to_heads ? 0 : 1, ranks));
    context.place("bias", to_heads ? heads_on(0, ranks) : tessera::Replicate());
    const tessera::Placement input = to_heads ? tessera::Replicate() : heads_on(-1, ranks);
    const tessera::Placement output = to_heads ? heads_on(-1, ranks) : tessera::Replicate();
    context.contract("weight", {.operators = {"matmul", "addmm"}, .input = input, .desired = input, .output = output});
  }

  std::string name() const override { return "HeadParallel"; }

 private:
  // Returns a cut of dimension `dim`, which has the features of all heads.
  tessera::Placement heads_on(int64_t dim, int64_t ranks) const {
    if (options_.heads % ranks == 0) return tessera::Shard(dim);
    const int64_t heads_of_rank = (options_.heads + ranks - 1) / ranks;
    return tessera::BlockCyclic(dim, heads_of_rank * (options_.hidden / options_.heads));
  }

  Side side_;
  TransformerOptions options_;
};

inline tessera::ParallelPlan parallel_plan(const TransformerOptions& options) {
  return {
      {"tok", tessera::RowwiseParallel()},
      {"layers.*.attn.w[qkv]", HeadParallel(HeadParallel::Side::kToHeads, options)},
      {"layers.*.attn.wo", HeadParallel(HeadParallel::Side::kFromHeads, options)},
      {"layers.*.mlp.up", tessera::ColwiseParallel()},
      {"layers.*.mlp.down", tessera::RowwiseParallel()},
      {"head", tessera::ColwiseParallel()},  // logits are cut along the vocabulary
  };
}

// Cuts the same layers, and what lies between them along the sequence too, as Megatron's sequence parallelism does: the
// embedding, attention and the MLP end in a reduce_scatter in the place of an all_reduce. It is the plan of
// tools/train.
inline tessera::ParallelPlan sequence_parallel_plan() {
  const tessera::Placement cut = tessera::Shard(1);
  return {{"tok", tessera::RowwiseParallel({.output_layouts = cut})},
          {"layers.*.norm[12]", tessera::SequenceParallel()},
          {"layers.*.attn.w[qkv]", tessera::ColwiseParallel()},
          {"layers.*.attn.wo", tessera::RowwiseParallel({.output_layouts = cut})},
          {"layers.*.mlp.up", tessera::ColwiseParallel()},
          {"layers.*.mlp.down", tessera::RowwiseParallel({.output_layouts = cut})},
          {"norm", tessera::SequenceParallel()},
          {"head", tessera::ColwiseParallel()}};
}
