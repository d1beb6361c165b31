#include "tessera/tests/ops/rules/simulate.h"

#include <limits>
#include <map>
#include <numeric>
#include <sstream>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/placement/layout.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/ops/rules/pieces.h"

namespace tessera::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

// Holds one rank's part of a call.
struct RankCall {
  const Prepared& sample;
  const Layouts& layouts;
  std::span<const int64_t> mesh_shape;
  Sizes coordinate;
  Tensors pieces;  // of the inputs
  torch::jit::Stack args;
  Tensors held = {};  // the pieces before rows of other ranks were fetched

  Tile tile(const at::Tensor& whole, const Placements& placements) const {
    return local_tile(whole.sizes(), placements, mesh_shape, coordinate);
  }
  // Returns what the rank has of input j when it computes.
  Tile input_tile(std::size_t j) const {
    const Tile own = tile(sample.tensors()[j], layouts.inputs[j]);
    return fetches(j) ? sample.rule().halos->needed(own, computed()) : own;
  }
  // Says whether rows of input j are fetched from other ranks.
  bool fetches(std::size_t j) const {
    const auto& halos = sample.rule().halos;
    if (!halos || std::ranges::find(halos->inputs, j) == halos->inputs.end()) return false;
    return std::ranges::any_of(layouts.inputs[j], [&](const Placement& p) {
      return p.is_shard() && std::ranges::find(halos->dims, p.tensor_dim()) != halos->dims.end();
    });
  }
  Tile computed() const {
    const auto& anchor = sample.rule().halos->anchor;
    return anchor ? tile(sample.tensors()[*anchor], layouts.inputs[*anchor])
                  : tile(sample.results()[0], layouts.outputs[0]);
  }
  // Returns the rows of dimension 0 that the rank holds. They are one range, since only chunks are simulated.
  Interval rows(const at::Tensor& whole, const Placements& placements) const {
    const Intervals held = local_tile(whole.sizes(), placements, mesh_shape, coordinate)[0];
    return held.empty() ? Interval{} : held.front();
  }
  Sizes local_sizes(std::size_t output) const {
    return local_shape(sample.results()[output].sizes(), layouts.outputs[output], mesh_shape, coordinate);
  }
  const at::IValue& arg(const char* name) const { return args[sample.call().arg_index(name)]; }
};

// ---- stand-ins for the local kernels

// Draws numbers, of which only the count is compared.
Tensors draw(const RankCall& rank) { return rank.sample.run(rank.args); }

// Runs on whole tensors in which everything but this rank's pieces is zero, and returns the pieces of the results.
Tensors by_whole(const RankCall& rank) {
  Tensors inputs = rank.pieces;
  for (std::size_t j = 0; j < inputs.size(); ++j) {
    const at::Tensor& whole = rank.sample.tensors()[j];
    if (whole.defined()) inputs[j] = embedded(inputs[j], rank.input_tile(j), whole.sizes());
  }
  Tensors out = rank.sample.run(rank.sample.args_with(inputs));
  for (std::size_t k = 0; k < out.size(); ++k) {
    if (out[k].defined()) out[k] = cut(out[k], rank.tile(out[k], rank.layouts.outputs[k]));
  }
  return out;
}

// Does the same, but computes the bias's gradient from the gradient rows that the rank holds.
Tensors convolution_backward(const RankCall& rank) {
  Tensors out = by_whole(rank);
  if (!out[2].defined()) return out;
  const at::Tensor& grad = rank.held.empty() ? rank.pieces[0] : rank.held[0];
  Sizes dims = {0};
  for (int64_t d = 2; d < grad.dim(); ++d) dims.push_back(d);
  out[2] = grad.sum(dims);
  return out;
}

Tensors mean(const RankCall& rank) {
  const at::Tensor& whole = rank.sample.tensors()[0];
  const double count = static_cast<double>(whole.numel()) / static_cast<double>(rank.sample.results()[0].numel());
  if (!rank.sample.call().has_arg("dim")) return {rank.args[0].toTensor().sum() / count};
  const Sizes dims = rank.sample.call().dims("dim", whole.dim());
  return {at::sum(rank.args[0].toTensor(), dims, rank.arg("keepdim").toBool()) / count};
}

Tensors extremum(const RankCall& rank) {
  const at::Tensor& piece = rank.args[0].toTensor();
  const Sizes sizes = rank.local_sizes(0);
  if (piece.numel() > 0) return rank.sample.run(rank.args);
  const std::string& name = rank.sample.schema().name();
  const double infinity = std::numeric_limits<double>::infinity();
  if (name == "aten::aminmax") {
    return {at::full(sizes, infinity, piece.options()), at::full(sizes, -infinity, piece.options())};
  }
  const bool is_max = name.find("max") != std::string::npos;
  return {at::full(sizes, is_max ? -infinity : infinity, piece.options())};
}

// Returns pieces of the whole results, which every rank of a joining mesh dimension has.
Tensors joined(const RankCall& rank) {
  Tensors out = rank.sample.results();
  for (std::size_t k = 0; k < out.size(); ++k) out[k] = cut(out[k], rank.tile(out[k], rank.layouts.outputs[k]));
  return out;
}

// Runs on whole tensors, with zeros for the gradient of other ranks' lines, and returns the pieces of the results.
Tensors layer_norm_backward(const RankCall& rank) {
  Tensors inputs = rank.sample.tensors();
  const at::Tensor grad = inputs[0];
  Tile lines = rank.input_tile(0);
  const Sizes shape = rank.arg("normalized_shape").toIntVector();
  for (std::size_t d = lines.size() - shape.size(); d < lines.size(); ++d)
    lines[d] = one_interval(0, grad.size(static_cast<int64_t>(d)));
  inputs[0] = embedded(cut(grad, lines), lines, grad.sizes());
  Tensors out = rank.sample.run(rank.sample.args_with(inputs));
  for (std::size_t k = 0; k < out.size(); ++k) {
    if (out[k].defined()) out[k] = cut(out[k], rank.tile(out[k], rank.layouts.outputs[k]));
  }
  return out;
}

Tensors reshape(const RankCall& rank) { return {rank.args[0].toTensor().reshape(rank.local_sizes(0))}; }

Tensors embedding(const RankCall& rank) {
  const at::Tensor& rows = rank.args[0].toTensor();
  const Interval range = rank.rows(rank.sample.tensors()[0], rank.layouts.inputs[0]);
  const at::Tensor indices = rank.args[1].toTensor() - range.begin;
  const at::Tensor here = (indices >= 0) & (indices < range.size());
  if (range.size() == 0) return {at::zeros(rank.local_sizes(0), rows.options())};
  return {at::embedding(rows, indices.clamp(0, range.size() - 1)) * here.unsqueeze(-1)};
}

Tensors embedding_dense_backward(const RankCall& rank) {
  const at::Tensor all = rank.sample.run(rank.args)[0];
  const Interval range = rank.rows(rank.sample.results()[0], rank.layouts.outputs[0]);
  return {all.narrow(0, range.begin, range.size())};
}

// Returns the arguments with scores of all classes, 0 where another rank has them: these add nothing.
torch::jit::Stack with_all_classes(const RankCall& rank, std::size_t self) {
  const at::Tensor& whole = rank.sample.tensors()[self];
  const int64_t dim = whole.dim() == 1 ? 0 : 1;
  Tile tile = rank.input_tile(self);
  Sizes sizes = rank.pieces[self].sizes().vec();
  for (std::size_t d = 0; d < tile.size(); ++d) {
    if (static_cast<int64_t>(d) == dim) continue;
    tile[d] = one_interval(0, sizes[d]);
  }
  sizes[dim] = whole.size(dim);
  Tensors inputs = rank.pieces;
  inputs[self] = embedded(inputs[self], tile, sizes);
  return rank.sample.args_with(inputs);
}

Tensors nll_loss(const RankCall& rank) {
  torch::jit::Stack args = with_all_classes(rank, 0);
  at::IValue& reduction = args[rank.sample.call().arg_index("reduction")];
  if (reduction.toInt() != 1) return rank.sample.run(args);
  reduction = 2;
  const at::Tensor& total = rank.sample.results()[1];
  return {rank.sample.run(args)[0] / total, total};
}

Tensors nll_loss_backward(const RankCall& rank) {
  const at::Tensor& whole = rank.sample.tensors()[1];
  const int64_t dim = whole.dim() == 1 ? 0 : 1;
  const at::Tensor all = rank.sample.run(with_all_classes(rank, 1))[0];
  const Intervals classes = rank.input_tile(1)[dim];
  return {classes.empty() ? all.narrow(dim, 0, 0) : all.narrow(dim, classes[0].begin, classes[0].size())};
}

Tensors as_it_is(const RankCall& rank) { return rank.sample.run(rank.args); }  // pieces are contiguous here

Tensors attention_backward(const RankCall& rank) {
  if (rank.args[0].toTensor().numel() != 0) return rank.sample.run(rank.args);
  const auto zeros = [&](std::size_t i) { return at::zeros(rank.local_sizes(i), rank.args[0].toTensor().options()); };
  return {zeros(0), zeros(1), zeros(2)};
}

using Kernel = Tensors (*)(const RankCall&);
const std::map<std::string_view, Kernel>& kernels() {
  static const std::map<std::string_view, Kernel> table = {
      {"mean", mean},
      {"draw", draw},
      {"parts", by_whole},
      {"convolution", by_whole},
      {"convolution_backward", convolution_backward},
      {"pooling", by_whole},
      {"parts_backward", by_whole},
      {"diagonal", by_whole},
      {"diagonal_backward", by_whole},
      {"triangle", by_whole},
      {"elements", by_whole},
      {"elements_added", by_whole},
      {"elements_written", by_whole},
      {"extremum", extremum},
      {"extremum_index", joined},
      {"topk", joined},
      {"deviation", joined},
      {"group_norm", as_it_is},
      {"reshape", reshape},
      {"contiguous", as_it_is},
      {"contiguous_statistics", as_it_is},
      {"attention_backward", attention_backward},
      {"embedding", embedding},
      {"embedding_dense_backward", embedding_dense_backward},
      {"layer_norm", joined},
      {"layer_norm_backward", layer_norm_backward},
      {"softmax", joined},
      {"softmax_backward", joined},
      {"logsumexp", joined},
      {"nll_loss", nll_loss},
      {"nll_loss_of_classes", nll_loss},
      {"nll_loss_backward", nll_loss_backward},
  };
  return table;
}

// ---- one rank

// Returns contiguous strides with the dimensions in the memory order of `like`.
Sizes dense_strides(const Sizes& sizes, const Sizes& like) {
  Sizes order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return like[a] < like[b]; });
  Sizes out(sizes.size());
  int64_t next = 1;
  for (const int64_t d : order) {
    out[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  }
  return out;
}

// Sets the numbers of items, channels, spatial elements and groups to those of the piece.
void count_groups(const Prepared& sample, const at::Tensor& piece, torch::jit::Stack& args) {
  const auto at = [&](const char* name) -> at::IValue& { return args[sample.call().arg_index(name)]; };
  const int64_t channels = at("C").toInt();
  const int64_t groups = at("group").toInt() * piece.size(1);
  if (groups % channels != 0) throw std::logic_error("a piece of a group of channels");
  at("group") = groups / channels;
  at("N") = piece.size(0);
  at("C") = piece.size(1);
  at("HxW") = piece.numel() / std::max<int64_t>(piece.size(0) * piece.size(1), 1);
}

// The dispatcher does not run an operator on a rank whose every result is empty.
bool nothing_here(const RankCall& rank) {
  for (std::size_t k = 0; k < rank.sample.results().size(); ++k) {
    if (!rank.sample.results()[k].defined()) continue;
    const Sizes sizes = rank.local_sizes(k);
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    if (!empty || any_partial(rank.layouts.outputs[k]) || rank.sample.results()[k].numel() == 0) return false;
  }
  return !rank.sample.in_place() && !rank.sample.results().empty();
}

Tensors empty_results(const RankCall& rank) {
  Tensors out;
  for (std::size_t k = 0; k < rank.sample.results().size(); ++k) {
    const at::Tensor& whole = rank.sample.results()[k];
    out.push_back(whole.defined() ? at::empty(rank.local_sizes(k), whole.options()) : at::Tensor());
  }
  return out;
}

// Gets rows of other ranks, as their exchange would.
void fetch(RankCall& rank) {
  rank.held = rank.pieces;
  for (std::size_t j = 0; j < rank.pieces.size(); ++j) {
    if (rank.fetches(j)) rank.pieces[j] = cut(rank.sample.tensors()[j], rank.input_tile(j));
  }
  rank.args = rank.sample.args_with(rank.pieces);
}

Tensors run_rank(RankCall& rank) {
  fetch(rank);
  const Tensors& results = rank.sample.results();
  const bool has_result = !results.empty() && results[0].defined();
  rank.args = localized(rank.sample, rank.pieces, has_result ? rank.local_sizes(0) : Sizes());
  if (nothing_here(rank)) return empty_results(rank);
  if (rank.layouts.kernel.empty()) return rank.sample.run(rank.args);
  const auto kernel = kernels().find(rank.layouts.kernel);
  if (kernel != kernels().end()) return kernel->second(rank);
  throw std::invalid_argument(
      fmt::format("local kernels of your own, such as {}, are not run in one process; test the operator on ranks",
                  rank.layouts.kernel));
}

// ---- all ranks

bool has_terms_of_two_kinds(const Placements& placements) {
  std::vector<ReduceOp> ops;
  for (const Placement& p : placements) {
    if (p.is_partial()) ops.push_back(p.is_partial(ReduceOp::kAvg) ? ReduceOp::kSum : p.reduction().op());
  }
  return std::adjacent_find(ops.begin(), ops.end(), std::not_equal_to<>()) != ops.end();
}

std::string check_local_results(const RankCall& rank, const Tensors& results) {
  if (results.size() != rank.sample.results().size()) return fmt::format("{} results", results.size());
  for (std::size_t k = 0; k < results.size(); ++k) {
    if (!rank.sample.results()[k].defined()) continue;
    if (results[k].sizes() != at::IntArrayRef(rank.local_sizes(k))) {
      return fmt::format("rank at [{}]: result {} has sizes [{}], not [{}]", fmt::join(rank.coordinate, ", "), k,
                         fmt::join(results[k].sizes(), ", "), fmt::join(rank.local_sizes(k), ", "));
    }
    if (results[k].scalar_type() != rank.sample.results()[k].scalar_type()) {
      return fmt::format("rank at [{}]: result {} is {}", fmt::join(rank.coordinate, ", "), k,
                         c10::toString(results[k].scalar_type()));
    }
  }
  return {};
}

std::string values(const at::Tensor& t) {
  std::ostringstream out;
  out << t;
  return out.str();
}

std::string compare(const Prepared& sample, const Layouts& layouts, std::span<const int64_t> mesh_shape,
                    const std::vector<Tensors>& by_rank) {
  for (std::size_t k = 0; k < sample.results().size(); ++k) {
    const at::Tensor& whole = sample.results()[k];
    if (!whole.defined()) continue;
    Tensors pieces;
    for (const Tensors& results : by_rank) pieces.push_back(results[k]);
    bool consistent = true;
    const at::Tensor joined = join(pieces, layouts.outputs[k], mesh_shape, whole.sizes(), consistent);
    if (sample.random()) continue;  // check_local_results has looked at what does not depend on the numbers
    if (!consistent) return fmt::format("result {} differs between ranks that should hold the same", k);
    if (!same_values(joined, whole)) {
      return fmt::format("result {} is\n{}\nnot\n{}", k, values(joined), values(whole));
    }
  }
  return {};
}

}  // namespace

torch::jit::Stack localized(const Prepared& sample, const std::vector<at::Tensor>& pieces,
                            const std::vector<int64_t>& sizes) {
  torch::jit::Stack args = sample.args_with(pieces);
  const rules::OpRule& rule = sample.rule();
  if (rule.size_arg >= 0) args[rule.size_arg] = sizes;
  if (rule.stride_arg >= 0) args[rule.stride_arg] = dense_strides(sizes, args[rule.stride_arg].toIntVector());
  if (rule.kernel == "group_norm") count_groups(sample, pieces[0], args);
  return args;
}

std::string simulate(const Prepared& sample, const Layouts& layouts, std::span<const int64_t> mesh_shape) {
  for (const Placements& p : layouts.outputs) {
    if (has_terms_of_two_kinds(p)) return "a result with terms of two kinds: " + to_string(p);
  }
  const std::size_t n = num_ranks(mesh_shape);
  std::vector<Tensors> pieces(n);
  for (std::size_t j = 0; j < sample.tensors().size(); ++j) {
    const at::Tensor& whole = sample.tensors()[j];
    Tensors cut(n);
    try {
      if (whole.defined()) cut = distribute(whole, layouts.inputs[j], mesh_shape);
    } catch (const std::exception& error) {  // a user's placement may refuse these values
      return fmt::format("input {} cannot be laid out: {}", j, std::string(error.what()).substr(0, 300));
    }
    for (std::size_t r = 0; r < n; ++r) pieces[r].push_back(cut[r]);
  }
  std::vector<Tensors> by_rank;
  for (std::size_t r = 0; r < n; ++r) {
    RankCall rank{sample, layouts, mesh_shape, coordinate_of(r, mesh_shape), pieces[r], {}};
    try {
      by_rank.push_back(run_rank(rank));
    } catch (const std::exception& error) {
      return fmt::format("rank {}: {}", r, std::string(error.what()).substr(0, 300));
    }
    const std::string wrong = check_local_results(rank, by_rank.back());
    if (!wrong.empty()) return wrong;
  }
  return compare(sample, layouts, mesh_shape, by_rank);
}

}  // namespace tessera::testing
