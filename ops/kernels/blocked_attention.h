#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/placement/intervals.h"

// Attention with dropout that never holds all scores at once. It works on one rank's pieces.
namespace tessera::detail {

// Describes the scores of attention, one for each item, head, row (a query) and key.
struct ScoreSizes {
  int64_t items = 0;
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t keys = 0;
  int64_t group = 1;    // how many heads share one head of keys
  bool causal = false;  // row i attends to keys 0 to i

  friend bool operator==(const ScoreSizes&, const ScoreSizes&) = default;
};

// Is a part of the scores: all keys before `keys` of these items, heads and rows.
struct ScoreBlock {
  Interval items;
  Interval heads;
  Interval rows;
  int64_t keys = 0;

  friend bool operator==(const ScoreBlock&, const ScoreBlock&) = default;
};

// Returns blocks of at most `most` scores each, or of one row if a row has more. Together they have every score but
// those of keys that no row of a causal block attends to. All scores are one block if that is possible. A block that
// holds several heads holds whole groups of them, and one of several items holds all heads.
//   2 items, 2 heads, 4 rows, 8 keys, most 64 -> 2 blocks of one item each; most 16 -> 8 blocks of 2 rows each
std::vector<ScoreBlock> score_blocks(const ScoreSizes& sizes, int64_t most);

struct DroppedAttention {
  double probability = 0;  // of a dropped score, in (0, 1)
  bool causal = false;
  std::optional<double> scale;  // of the scores; default: 1 / sqrt(the last size of the query)
  DrawKey key;                  // from which the kept scores are drawn
  SpecPtr scores;               // of the global scores [items, heads, rows, keys]
  int64_t most = 0;             // scores of a block; 0: as many as run well on the CPU, or on a GPU
};

// Returns the strides of a result of `sizes`: the query's order in memory, or row-major if the query is expanded.
std::vector<int64_t> attention_strides(const std::vector<int64_t>& sizes, const at::Tensor& query);

// Returns softmax(scale * query key^T + mask), of which each element is dropped with that probability and the others
// are divided by 1 - probability, times value. These are plain tensors, this rank's pieces:
//   query [items, heads, rows, e], key [items, heads / group, keys, e], value [items, heads / group, keys, f] ->
//   [items, heads, rows, f], with attention_strides
// `mask` may be undefined; it is bool or of the query's dtype, broadcasts to the scores, and gets no gradient. Float16
// and bfloat16 are computed in float32. Which scores are kept depends on the key and their place in the global scores.
//
// Memory beyond inputs, result and gradients: a few blocks; and where key and value are not row-major in the type that
// is computed in, copies of them that are, in backward with gradients in that type. Backward computes and draws each
// block again, unless there is only one; where it is differentiated itself, it holds all scores of the piece. Without a
// derivative forward. No communication.
at::Tensor blocked_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const at::Tensor& mask, const DroppedAttention& options);

}  // namespace tessera::detail
