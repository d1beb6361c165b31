#include "tessera/layers/sharded_embedding.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/device_checks.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/ops/kernels/masked_rows.h"
#include "tessera/placement/partition.h"

namespace tessera {
namespace {

// Holds the sizes of a valid call, for the whole table.
struct Table {
  int64_t rows;
  int64_t columns;
  int64_t padding;  // -1: none
  Interval mine;    // this rank's rows, or columns
};

constexpr const char* kName = "sharded_embedding";

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(fmt::format("{}: {}", kName, why)); }

void check_tensors(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh) {
  check_one_dimension(mesh, kName);
  if (!ids.defined() || !weight.defined()) refuse("the ids or the weight are undefined");
  if (is_dtensor(ids) || is_dtensor(weight)) refuse("a DTensor was given; call torch::embedding, which takes DTensors");
  check_device(ids, mesh, kName, "tensor of ids");
  check_device(weight, mesh, kName, "weight");
  if (weight.dim() != 2) {
    refuse_alone(mesh, kName, fmt::format("weight [{}]; it is [rows, columns]", fmt::join(weight.sizes(), ", ")));
  }
  if (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt) {
    refuse(fmt::format("ids have dtype {}; give int64 or int32", c10::toString(ids.scalar_type())));
  }
}

// Says whether all ranks of the mesh have the same number of rows, and so see an id or padding_idx outside the table
// alike. Where each rank took the size from its own rows, they may differ.
bool is_counted(const DeviceMesh& mesh, const ShardedEmbeddingOptions& options) {
  return options.cut == EmbeddingCut::kNone || mesh.size() == 1 || options.num_embeddings;
}

[[noreturn]] void refuse_count(const std::string& why, const DeviceMesh& mesh) {
  refuse_alone(mesh, kName, why + "; give options.num_embeddings if ranks have different numbers of rows");
}

Table table_of(const at::Tensor& weight, const DeviceMesh& mesh, const ShardedEmbeddingOptions& options) {
  const bool by_rows = options.cut == EmbeddingCut::kVocabulary;
  const int64_t n = options.cut == EmbeddingCut::kNone ? 1 : mesh.size();
  Table table{.rows = options.num_embeddings.value_or(weight.size(0) * (by_rows ? n : 1)),
              .columns = options.embedding_dim.value_or(weight.size(1) * (by_rows ? 1 : n)),
              .padding = options.padding_idx.value_or(-1),
              .mine = {}};
  table.mine = chunk_range(by_rows ? table.rows : table.columns, n, n == 1 ? 0 : mesh.local_rank(0));
  // A rank without rows or columns cannot know how many the others have.
  const bool counted = by_rows ? options.num_embeddings.has_value() : options.embedding_dim.has_value();
  if (n > 1 && !counted && weight.size(by_rows ? 0 : 1) == 0) {
    refuse_alone(mesh, kName,
                 fmt::format("weight is [{}] on this rank; for uneven parts give options.{}",
                             fmt::join(weight.sizes(), ", "), by_rows ? "num_embeddings" : "embedding_dim"));
  }
  const int64_t rows = by_rows ? table.mine.size() : table.rows;
  const int64_t columns = by_rows ? table.columns : table.mine.size();
  if (weight.size(0) != rows || weight.size(1) != columns) {
    refuse_alone(mesh, kName,
                 fmt::format("weight is [{}] on this rank, whose part of the table [{}, {}] is [{}, {}]",
                             fmt::join(weight.sizes(), ", "), table.rows, table.columns, rows, columns));
  }
  if (!options.padding_idx) return table;
  if (*options.padding_idx < -table.rows || *options.padding_idx >= table.rows) {
    const std::string why =
        fmt::format("padding_idx {} must be within num_embeddings, {}", *options.padding_idx, table.rows);
    if (is_counted(mesh, options)) refuse(why);
    refuse_count(why, mesh);
  }
  table.padding = *options.padding_idx < 0 ? *options.padding_idx + table.rows : *options.padding_idx;
  return table;
}

// Says whether masked_embedding does the call: on a GPU, where the host would wait for the number of this rank's ids.
// It checks the ids too.
bool is_masked(const at::Tensor& ids, const at::Tensor& weight, const ShardedEmbeddingOptions& options) {
  return options.cut == EmbeddingCut::kVocabulary && is_queued(ids) && !options.max_norm && !options.sparse &&
         !detail::has_tangent(weight);
}

void check_ids(const at::Tensor& ids, const Table& table, const DeviceMesh& mesh,
               const ShardedEmbeddingOptions& options) {
  if (ids.numel() == 0) return;
  const at::Tensor outside = ids.lt(0).logical_or_(ids.ge(table.rows));
  if (is_queued(ids)) {
    return check_on_device(outside.logical_not(), "sharded_embedding: an id is outside the table's rows");
  }
  if (!outside.any().item<bool>()) return;
  const std::string why =
      fmt::format("id {} is outside the table of {} rows", ids.masked_select(outside)[0].item<int64_t>(), table.rows);
  if (is_counted(mesh, options)) refuse_value(mesh, kName, why);
  refuse_count(why, mesh);
}

// Returns the p-norm of each row, over all its columns even where the ranks have parts of them, as at::norm defines it:
// for p of plus or minus infinity the greatest or least magnitude, for 0 the number of elements that are not 0.
at::Tensor norms_of(const at::Tensor& rows, double p, bool in_parts, const DeviceMesh& mesh) {
  const auto total = [&](const at::Tensor& mine, ReduceOp op) {
    return in_parts ? all_reduce(mine, mesh, 0, op) : mine;
  };
  if (std::isinf(p)) {
    const bool greatest = p > 0, empty = rows.size(1) == 0;
    const at::Tensor none =
        at::full({rows.size(0)}, greatest ? 0.0 : std::numeric_limits<double>::infinity(), rows.options());
    const at::Tensor mine = empty ? none : greatest ? rows.abs().amax(1) : rows.abs().amin(1);
    return total(mine, greatest ? ReduceOp::kMax : ReduceOp::kMin);
  }
  if (p == 0) return total(rows.ne(0).sum(1).to(rows.scalar_type()), ReduceOp::kSum);
  return total(rows.abs().pow(p).sum(1), ReduceOp::kSum).pow(1 / p);
}

// `ids` are row numbers in `weight`. The norm of a row whose columns are on all ranks is over all of them.
void renormalize(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh,
                 const ShardedEmbeddingOptions& options) {
  const c10::AutoGradMode none(false);
  const at::Tensor used =
      std::get<0>(at::_unique(ids.reshape({-1}).to(at::kLong)));  // sorted, so in the same order on every rank
  const at::ScalarType dtype = weight.scalar_type();
  const at::Tensor rows =
      weight.detach().index_select(0, used).to(at::isReducedFloatingType(dtype) ? at::kFloat : dtype);
  const at::Tensor norms = norms_of(rows, options.norm_type, options.cut == EmbeddingCut::kWidth, mesh);
  const at::Tensor scale =
      at::where(norms > *options.max_norm, *options.max_norm / (norms + 1e-7), at::ones_like(norms));
  weight.detach().index_copy_(0, used, (rows * scale.unsqueeze(1)).to(weight.scalar_type()));
}

// Looks up rows in this rank's part of the table.
at::Tensor look_up(const at::Tensor& ids, const at::Tensor& weight, int64_t padding, const DeviceMesh& mesh,
                   const ShardedEmbeddingOptions& options) {
  if (options.max_norm) renormalize(ids, weight, mesh, options);
  // LibTorch's backward on a GPU writes beside the gradient of a table that has no columns.
  if (weight.size(1) == 0 && is_queued(weight) && !options.sparse && !detail::has_tangent(weight)) {
    return detail::masked_embedding(weight, ids, {one_interval(0, weight.size(0)), weight.size(0)}, padding,
                                    options.scale_grad_by_freq);
  }
  return at::embedding(weight, ids, padding, options.scale_grad_by_freq, options.sparse);
}

// Returns this rank's rows, and zeros for the ids of other ranks. Only this rank's ids are looked up, so that others do
// not affect a row's frequency, norm or padding, and a rank without rows looks up nothing.
at::Tensor own_rows(const at::Tensor& ids, const at::Tensor& weight, const Table& table, const DeviceMesh& mesh,
                    const ShardedEmbeddingOptions& options) {
  const at::Tensor flat = ids.reshape({-1});
  const at::Tensor places = flat.ge(table.mine.begin).logical_and_(flat.lt(table.mine.end)).nonzero().squeeze(1);
  const bool padded_here = table.padding >= table.mine.begin && table.padding < table.mine.end;
  const at::Tensor rows = look_up(flat.index_select(0, places) - table.mine.begin, weight,
                                  padded_here ? table.padding - table.mine.begin : -1, mesh, options);
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(table.columns);
  return at::zeros({flat.size(0), table.columns}, weight.options()).index_copy(0, places, rows).view(sizes);
}

at::Tensor local(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh,
                 const ShardedEmbeddingOptions& options, const Table& table) {
  if (is_masked(ids, weight, options)) {
    return detail::masked_embedding(weight, ids, {one_interval(table.mine.begin, table.mine.end), table.rows},
                                    table.padding, options.scale_grad_by_freq);
  }
  check_ids(ids, table, mesh, options);
  return options.cut == EmbeddingCut::kVocabulary ? own_rows(ids, weight, table, mesh, options)
                                                  : look_up(ids, weight, table.padding, mesh, options);
}

}  // namespace

at::Tensor sharded_embedding_local(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh,
                                   const ShardedEmbeddingOptions& options) {
  check_tensors(ids, weight, mesh);
  return local(ids, weight, mesh, options, table_of(weight, mesh, options));
}

at::Tensor sharded_embedding(const at::Tensor& ids, const at::Tensor& weight, const DeviceMesh& mesh,
                             const ShardedEmbeddingOptions& options) {
  check_tensors(ids, weight, mesh);
  const Table table = table_of(weight, mesh, options);
  at::Tensor mine = local(ids, weight, mesh, options, table);
  switch (options.cut) {
    case EmbeddingCut::kVocabulary: return reduce_from_region(mine, mesh);
    case EmbeddingCut::kWidth: return gather_from_region(mine, mesh, {.tensor_dim = -1, .size = table.columns});
    case EmbeddingCut::kNone: break;
  }
  return mine;
}

}  // namespace tessera
