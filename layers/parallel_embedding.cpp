#include "tessera/layers/parallel_embedding.h"

#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/mesh/mesh_checks.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("ParallelEmbedding: " + why); }

Placement placement_of(EmbeddingCut cut) {
  switch (cut) {
    case EmbeddingCut::kVocabulary: return Shard(0);
    case EmbeddingCut::kWidth: return Shard(1);
    case EmbeddingCut::kNone: break;
  }
  return Replicate();
}

void check_even(const ParallelEmbeddingOptions& options, int64_t ranks) {
  const Placement cut = placement_of(options.cut);
  if (cut.is_replicate() || options.allow_uneven) return;
  const bool by_rows = cut.tensor_dim() == 0;
  const int64_t size = by_rows ? options.num_embeddings : options.embedding_dim;
  if (size % ranks == 0) return;
  refuse(fmt::format("{} {} are not divisible by {} ranks; allow_uneven, or pad them", size,
                     by_rows ? "rows" : "columns", ranks));
}

ParallelEmbeddingOptions checked(ParallelEmbeddingOptions options, const DeviceMesh& mesh) {
  check_one_dimension(mesh, "ParallelEmbedding");
  const int64_t rows = options.num_embeddings, columns = options.embedding_dim;
  if (rows < 1 || columns < 1)
    refuse(fmt::format("the table is [{}, {}]; give it at least one row and one column", rows, columns));
  if (options.padding_idx) {
    if (*options.padding_idx < -rows || *options.padding_idx >= rows) {
      refuse(fmt::format("padding_idx {} must be within num_embeddings, {}", *options.padding_idx, rows));
    }
    if (*options.padding_idx < 0) *options.padding_idx += rows;
  }
  const at::Tensor& given = options.given_weight;
  if (given.defined() && (is_dtensor(given) || given.sizes() != at::IntArrayRef({rows, columns}))) {
    refuse(fmt::format("given_weight is [{}]; it is the whole table, plain, [{}, {}]", fmt::join(given.sizes(), ", "),
                       rows, columns));
  }
  if (options.config.sequence_parallel && options.cut != EmbeddingCut::kVocabulary) {
    refuse("sequence_parallel needs a table that is cut by the vocabulary; set cut to EmbeddingCut::kVocabulary");
  }
  check_even(options, mesh.size());
  return options;
}

// Returns the options that the layer keeps: without the whole table, which would otherwise live as long as the layer.
ParallelEmbeddingOptions kept(ParallelEmbeddingOptions options) {
  options.given_weight = at::Tensor();
  if (!options.init_method) options.init_method = init_method(InitType::kXavierNormal);
  return options;
}

const char* name_of(EmbeddingCut cut) {
  switch (cut) {
    case EmbeddingCut::kVocabulary: return "vocabulary";
    case EmbeddingCut::kWidth: return "width";
    case EmbeddingCut::kNone: break;
  }
  return "none";
}

}  // namespace

ParallelEmbeddingImpl::ParallelEmbeddingImpl(const ParallelEmbeddingOptions& given, const DeviceMesh& mesh)
    : Layer("ParallelEmbedding"), options(kept(checked(given, mesh))), mesh_(mesh) {
  const c10::AutoGradMode none(false);
  const Placement cut = placement_of(options.cut);
  const at::ScalarType dtype = options.config.params_dtype;
  at::Tensor table;
  if (given.given_weight.defined()) {
    table = distribute_tensor(given.given_weight.detach(), mesh, {cut}, kNoSource);
  } else {
    table = empty({options.num_embeddings, options.embedding_dim}, mesh, {cut}, dtype);
    if (options.config.perform_initialization) {
      options.init_method(table);
      if (options.padding_idx) table.select(0, *options.padding_idx).zero_();
    }
  }
  weight = table.set_requires_grad(true);
  reset();
}

void ParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  detail::LayerText text("ParallelEmbedding");
  text.add("num_embeddings", options.num_embeddings).add("embedding_dim", options.embedding_dim);
  text.add("cut", name_of(options.cut));
  if (options.padding_idx) text.add("padding_idx", *options.padding_idx);
  if (options.max_norm) text.add("max_norm", *options.max_norm);
  text.add_unless(2.0, "norm_type", options.norm_type)
      .add_unless(false, "scale_grad_by_freq", options.scale_grad_by_freq)
      .add_unless(false, "sparse", options.sparse)
      .add_unless(false, "allow_uneven", options.allow_uneven)
      .add_unless(false, "sequence_parallel", options.config.sequence_parallel);
  const at::ScalarType dtype = weight.scalar_type();
  if (dtype != ModelParallelConfig().params_dtype) text.add("params_dtype", c10::toString(dtype));
  stream << text.text();
}

at::Tensor ParallelEmbeddingImpl::piece() const {
  const Placement cut = placement_of(options.cut);
  if (options.max_norm && is_dtensor(weight) && placements_of(weight) != Placements{cut}) {
    refuse(fmt::format(
        "max_norm writes the table, and the assigned weight is {}, not cut as {}: what is written to a copy "
        "would be lost; redistribute the weight",
        to_string(weight), to_string(cut)));
  }
  const std::vector<int64_t> sizes = {options.num_embeddings, options.embedding_dim};
  return detail::parameter_piece(weight, {"weight", sizes, cut}, mesh_, "ParallelEmbedding");
}

at::Tensor ParallelEmbeddingImpl::of_plain(const at::Tensor& ids) const {
  const ShardedEmbeddingOptions how{.cut = options.cut,
                                    .num_embeddings = options.num_embeddings,
                                    .embedding_dim = options.embedding_dim,
                                    .padding_idx = options.padding_idx,
                                    .max_norm = options.max_norm,
                                    .norm_type = options.norm_type,
                                    .scale_grad_by_freq = options.scale_grad_by_freq};
  const at::Tensor table = piece();
  if (!options.config.sequence_parallel) return sharded_embedding(ids, table, mesh_, how);
  if (ids.defined() && ids.dim() == 0)
    refuse("the ids have no dimension; with sequence_parallel give ids [sequence, *]");
  return reduce_scatter_to_sequence_region(sharded_embedding_local(ids, table, mesh_, how), mesh_);
}

at::Tensor ParallelEmbeddingImpl::forward(const at::Tensor& ids) {
  if (!is_dtensor(ids)) return of_plain(ids);
  if (!(mesh_of(ids) == mesh_)) {
    refuse(fmt::format("the ids are on mesh {}, the layer on {}; redistribute them with redistribute_to",
                       mesh_of(ids).to_string(), mesh_.to_string()));
  }
  const at::Tensor rows = of_plain(full_tensor(ids));
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(options.embedding_dim);
  return from_local(rows, mesh_, {options.config.sequence_parallel ? Shard(0) : Replicate()}, {.shape = sizes});
}

at::Tensor ParallelEmbeddingImpl::master_weight() const {
  const std::vector<int64_t> sizes = {options.num_embeddings, options.embedding_dim};
  return detail::whole_parameter(weight, {"weight", sizes, placement_of(options.cut)}, mesh_, "ParallelEmbedding");
}

ParallelEmbedding vocab_parallel_embedding(int64_t num_embeddings, int64_t embedding_dim, const DeviceMesh& mesh,
                                           const InitMethod& method, const ModelParallelConfig& config) {
  ParallelEmbeddingOptions options(num_embeddings, embedding_dim);
  options.cut = EmbeddingCut::kVocabulary;
  options.init_method = method;
  options.config = config;
  return ParallelEmbedding(options, mesh);
}

}  // namespace tessera
