#include "tessera/tests/ops/rules/missing.h"

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <set>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/ops/rules/search.h"
#include "tessera/tests/ops/rules/pieces.h"
#include "tessera/tests/ops/rules/simulate.h"
#include "tessera/tests/ops/rules/variants.h"

namespace tessera::testing {
namespace {

using rules::Strategy;
using Tensors = std::vector<at::Tensor>;

constexpr std::array kPending = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin};
constexpr double kFree = 1;                 // microseconds: less than any collective takes
constexpr std::size_t kMostLayouts = 1500;  // of a call's tensors
constexpr std::size_t kMostResults = 64;    // layouts tried for the results of one call

const std::vector<int64_t>& pair() {
  static const std::vector<int64_t> mesh = {2};
  return mesh;
}

// Says whether a kernel does not compare the sizes of its tensors, so that cuts that do not match end the process. Only
// pending tensors are tried with such a kernel.
bool trusts_sizes(const std::string& name) {
  static const std::set<std::string> names = {"aten::_adaptive_avg_pool2d_backward",
                                              "aten::_adaptive_avg_pool3d_backward",
                                              "aten::_cholesky_solve_helper",
                                              "aten::_native_batch_norm_legit",
                                              "aten::_native_batch_norm_legit_no_training",
                                              "aten::_scaled_dot_product_flash_attention_for_cpu",
                                              "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                                              "aten::_weight_norm_interface",
                                              "aten::adaptive_max_pool2d_backward",
                                              "aten::adaptive_max_pool3d_backward",
                                              "aten::avg_pool2d_backward",
                                              "aten::avg_pool3d_backward",
                                              "aten::_cdist_backward",
                                              "aten::embedding_dense_backward",
                                              "aten::fractional_max_pool2d_backward",
                                              "aten::fractional_max_pool3d_backward",
                                              "aten::linalg_ldl_solve",
                                              "aten::lu_unpack",
                                              "aten::max_pool2d_with_indices_backward",
                                              "aten::max_pool3d_with_indices_backward",
                                              "aten::native_batch_norm",
                                              "aten::native_layer_norm_backward",
                                              "aten::nll_loss2d_backward",
                                              "aten::nll_loss_backward",
                                              "aten::rrelu_with_noise_backward"};
  return names.contains(name);
}

// ---- layouts of tensors

// Holds a layout of one tensor, and its pieces on two ranks.
struct Laid {
  Placement placement;
  Tensors pieces;
};

Laid laid(const at::Tensor& whole, const Placement& placement) {
  return {.placement = placement, .pieces = whole.defined() ? distribute(whole, {placement}, pair()) : Tensors(2)};
}

bool is_number(const at::Tensor& t) {
  return t.defined() && (at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type()));
}

// Returns Replicate, then the cuts, then the pending layouts.
std::vector<Laid> layouts_of(const at::Tensor& whole, bool cuts, bool pends) {
  std::vector<Laid> out = {laid(whole, Replicate())};
  if (!whole.defined()) return out;
  for (int64_t d = 0; cuts && d < whole.dim(); ++d) {
    if (whole.size(d) > 1) out.push_back(laid(whole, Shard(d)));
  }
  for (const ReduceOp op : kPending) {
    if (pends && can_be_partial(whole.scalar_type(), op) && whole.numel() > 0) out.push_back(laid(whole, Partial(op)));
  }
  return out;
}

// [tensor]: the layouts to choose from.
using Options = std::vector<std::vector<const Laid*>>;
using Chosen = std::vector<const Laid*>;

std::size_t count_of(const Options& options) {
  std::size_t out = 1;
  for (const auto& each : options) out *= each.size();
  return out;
}

void each_choice(const Options& options, Chosen& chosen, const std::function<void(const Chosen&)>& visit) {
  if (chosen.size() == options.size()) return visit(chosen);
  for (const Laid* laid : options[chosen.size()]) {
    chosen.push_back(laid);
    each_choice(options, chosen, visit);
    chosen.pop_back();
  }
}

bool moved(const Laid* laid) { return !laid->placement.is_replicate(); }

// Enumerates those layouts of a call's tensors that are tried.
class Layouter {
 public:
  Layouter(const Tensors& tensors, bool cuts) : tensors_(tensors) {
    // Beside floating point numbers, integers are indices, masks and classes.
    const bool numbers = std::any_of(tensors.begin(), tensors.end(), is_number);
    for (const at::Tensor& t : tensors) all_.push_back(layouts_of(t, cuts, !numbers || is_number(t)));
  }

  void each(const std::function<void(const Chosen&)>& visit) {
    std::set<Chosen> seen;
    const auto once = [&](const Chosen& chosen) {
      if (std::any_of(chosen.begin(), chosen.end(), moved) && seen.insert(chosen).second) visit(chosen);
    };
    for (const Placement& kind : {Placement(Replicate()), Partial(kPending[0]), Partial(kPending[1]),
                                  Partial(kPending[2]), Partial(kPending[3])}) {
      try_all(kind, once);
    }
  }

 private:
  void try_all(const Placement& kind, const std::function<void(const Chosen&)>& visit) {
    const Options options = select([&](const at::Tensor&, const Placement& p) { return !p.is_partial() || p == kind; });
    Chosen chosen;
    if (count_of(options) <= kMostLayouts) return each_choice(options, chosen, visit);
    at_most_two(options, chosen, 2, visit);
    std::set<int64_t> sizes;
    for (const at::Tensor& t : tensors_) {
      if (t.defined()) sizes.insert(t.sizes().begin(), t.sizes().end());
    }
    for (const int64_t size : sizes) {
      const Options equal = select(
          [&](const at::Tensor& t, const Placement& p) { return p.is_shard() && t.size(p.tensor_dim()) == size; });
      if (count_of(equal) <= kMostLayouts) each_choice(equal, chosen, visit);
    }
  }

  void at_most_two(const Options& options, Chosen& chosen, int left, const std::function<void(const Chosen&)>& visit) {
    if (chosen.size() == options.size()) return visit(chosen);
    for (const Laid* laid : options[chosen.size()]) {
      if (moved(laid) && left == 0) break;
      chosen.push_back(laid);
      at_most_two(options, chosen, left - (moved(laid) ? 1 : 0), visit);
      chosen.pop_back();
    }
  }

  // Replicate is always among the options.
  Options select(const std::function<bool(const at::Tensor&, const Placement&)>& wanted) const {
    Options out;
    for (std::size_t j = 0; j < all_.size(); ++j) {
      out.emplace_back();
      for (const Laid& laid : all_[j]) {
        if (!moved(&laid) || wanted(tensors_[j], laid.placement)) out.back().push_back(&laid);
      }
    }
    return out;
  }

  const Tensors& tensors_;
  std::vector<std::vector<Laid>> all_;
};

// ---- layouts of results

// Returns the layouts that a result may have, cheapest first.
std::vector<Laid> readings_of(const at::Tensor& whole) {
  std::vector<Laid> out = {laid(whole, Replicate())};
  for (int64_t d = 0; whole.defined() && d < whole.dim(); ++d) {
    if (whole.size(d) > 1) out.push_back(laid(whole, Shard(d)));
  }
  return out;
}

Placements read(const at::Tensor& whole, const std::vector<Laid>& readings, const Tensors& pieces) {
  Placements out;
  if (!whole.defined()) return {Replicate()};
  for (const at::Tensor& piece : pieces) {
    if (!piece.defined() || piece.scalar_type() != whole.scalar_type()) return {};
  }
  for (const Laid& laid : readings) {
    if (same_values(pieces[0], laid.pieces[0]) && same_values(pieces[1], laid.pieces[1])) out.push_back(laid.placement);
  }
  if (pieces[0].sizes() != whole.sizes() || pieces[1].sizes() != whole.sizes()) return out;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct}) {
    if (can_be_partial(whole.scalar_type(), op) && same_values(reduced(pieces, op), whole)) out.push_back(Partial(op));
  }
  return out;
}

Placements placements_of(const Chosen& chosen) {
  Placements out;
  for (const Laid* laid : chosen) out.push_back(laid->placement);
  return out;
}

std::vector<Placements> columns(const Placements& placements) {
  std::vector<Placements> out;
  for (const Placement& p : placements) out.push_back({p});
  return out;
}

bool is_pending(const Placement& p) { return p.is_partial(); }
bool pends(const Placements& placements) { return std::any_of(placements.begin(), placements.end(), is_pending); }

// Says whether a result of `a` is pending only where that of `b` is: a pending result has yet to be reduced.
bool as_good(const Placements& a, const Placements& b) {
  return std::equal(a.begin(), a.end(), b.begin(),
                    [](const Placement& x, const Placement& y) { return !x.is_partial() || y.is_partial(); });
}

// ---- draws

// Says whether the call can be used: infinities and NaN cannot be terms of a sum.
bool is_finite(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& t) { return !t.defined() || at::isfinite(t).all().item<bool>(); });
}

class Finder {
 public:
  explicit Finder(const Draws& draws) : given_(draws) {
    if (draw(0) == nullptr) throw std::logic_error("no draw has a finite result");
    for (const at::Tensor& t : first().results()) readings_.push_back(readings_of(t));
  }

  std::vector<Strategy> run() {
    Layouter(first().tensors(), !trusts_sizes(first().schema().name())).each([&](const Chosen& chosen) {
      try_layout(chosen);
    });
    std::vector<Strategy> out;
    for (const Strategy& s : found_) {
      const bool done = std::any_of(found_.begin(), found_.end(), [&](const Strategy& other) {
        return does_for(other, s) || is_average_of(other, s);
      });
      if (!done) out.push_back(s);
    }
    return out;
  }

 private:
  // Returns nullptr after the last draw. Draws are made when they are needed, since most layouts fail with the first.
  const Prepared* draw(std::size_t i) {
    while (draws_.size() <= i) {
      if (waiting_.empty()) {
        if (next_ == given_.size()) return nullptr;
        for (Sample& each : variants(given_[next_++])) waiting_.push_back(std::move(each));
      }
      add(waiting_.front());
      waiting_.pop_front();
    }
    return &draws_[i];
  }

  // Adds the draw unless LibTorch refuses the arguments.
  void add(const Sample& sample) {
    try {
      draws_.emplace_back(sample);
      if (!is_finite(draws_.back().results())) draws_.pop_back();
    } catch (const std::exception&) {
    }
  }

  const Prepared& first() const { return draws_.at(0); }

  // Says whether `b` is for an average what `a` is for a sum.
  static bool is_average_of(const Strategy& a, const Strategy& b) {
    const auto same = [](const Placement& x, const Placement& y) {
      return x == y || (x.is_partial(ReduceOp::kSum) && y.is_partial(ReduceOp::kAvg));
    };
    return !(a.inputs == b.inputs) && std::equal(a.inputs.begin(), a.inputs.end(), b.inputs.begin(), same) &&
           std::equal(a.outputs.begin(), a.outputs.end(), b.outputs.begin(), same);
  }

  // Says whether `a` is another strategy that serves wherever `b` does.
  static bool does_for(const Strategy& a, const Strategy& b) {
    const bool reached =
        std::equal(b.inputs.begin(), b.inputs.end(), a.inputs.begin(),
                   [](const Placement& from, const Placement& to) { return from.is_replicate() || from == to; });
    return !(a.inputs == b.inputs) && reached && as_good(a.outputs, b.outputs);
  }

  void try_layout(const Chosen& chosen) {
    const Placements inputs = placements_of(chosen);
    const auto choice = rules::choose(first().rule(), first().call().inputs, first().outputs(), columns(inputs), pair(),
                                      CostModel::gloo(1));
    const bool free = choice && choice->microseconds < kFree;
    Placements offered;
    for (std::size_t k = 0; free && k < choice->outputs.size(); ++k) {
      offered.push_back(first().results()[k].defined() ? choice->outputs[k][0] : Placement(Replicate()));
    }
    if (free && !pends(offered)) return;
    for (const std::vector<Placements>& readings : run_pieces(chosen)) {
      Placements outputs;
      std::size_t left = kMostResults;
      if (settle(inputs, readings, offered, outputs, left)) return;
    }
  }

  // Returns the layouts that each result of the call on pieces may have, for every size that the call can ask for.
  std::vector<std::vector<Placements>> run_pieces(const Chosen& chosen) const {
    std::vector<std::vector<Placements>> out;
    const std::size_t ways = first().rule().size_arg >= 0 ? readings_[0].size() : 1;
    for (std::size_t way = 0; way < ways; ++way) {
      std::vector<Tensors> by_rank;
      for (std::size_t r = 0; r < 2; ++r) {
        Tensors pieces;
        for (const Laid* laid : chosen)
          pieces.push_back(laid->pieces[r].defined() ? laid->pieces[r].clone() : at::Tensor());
        const at::Tensor& result = readings_[0][way].pieces[r];
        try {
          by_rank.push_back(first().run(
              localized(first(), pieces, result.defined() ? result.sizes().vec() : std::vector<int64_t>())));
        } catch (const std::exception&) {
          break;
        }
      }
      if (by_rank.size() < 2) continue;
      std::vector<Placements> readings;
      for (std::size_t k = 0; k < readings_.size(); ++k) {
        const bool there = k < by_rank[0].size() && k < by_rank[1].size();
        readings.push_back(there ? read(first().results()[k], readings_[k], {by_rank[0][k], by_rank[1][k]})
                                 : Placements());
        if (readings.back().empty()) break;
      }
      if (!readings.back().empty()) out.push_back(std::move(readings));
    }
    return out;
  }

  // Finds the first layouts of the results that hold for all draws and are better than what is offered, if there are
  // any.
  bool settle(const Placements& inputs, const std::vector<Placements>& readings, const Placements& offered,
              Placements& outputs, std::size_t& left) {
    if (outputs.size() == readings.size()) {
      if (left == 0) return false;
      --left;
      if (!offered.empty() && (!as_good(outputs, offered) || as_good(offered, outputs))) return false;
      if (!holds(inputs, outputs)) return false;
      found_.push_back({.inputs = inputs, .outputs = outputs});
      return true;
    }
    for (const Placement& p : readings[outputs.size()]) {
      outputs.push_back(p);
      if (settle(inputs, readings, offered, outputs, left)) return true;
      outputs.pop_back();
    }
    return false;
  }

  bool holds(const Placements& inputs, const Placements& outputs) {
    for (std::size_t i = 0; const Prepared* each = draw(i); ++i) {
      if (!holds_for(*each, inputs, outputs)) return false;
    }
    return true;
  }

  static bool holds_for(const Prepared& draw, const Placements& inputs, const Placements& outputs) {
    const Layouts layouts = {.inputs = columns(inputs), .outputs = columns(outputs), .kernel = draw.rule().kernel};
    for (const int64_t n : {2, 3, 4}) {
      const std::vector<int64_t> mesh = {n};
      if (draw.rule().valid && !draw.rule().valid(layouts.inputs, layouts.outputs, mesh)) return false;
      if (!simulate(draw, layouts, mesh).empty()) return false;
    }
    return true;
  }

  const Draws& given_;
  std::size_t next_ = 0;  // of the next one in given_
  std::deque<Sample> waiting_;
  std::deque<Prepared> draws_;               // a deque, since each refers to itself and must not move
  std::vector<std::vector<Laid>> readings_;  // [result of the first draw]
  std::vector<Strategy> found_;
};

}  // namespace

std::vector<Strategy> missing_strategies(const Draws& draws) { return Finder(draws).run(); }

std::string to_string(const Strategy& strategy) {
  const auto text = [](const Placements& placements) {
    std::vector<std::string> out;
    for (const Placement& p : placements) out.push_back(tessera::to_string(p));
    return fmt::format("{}", fmt::join(out, ", "));
  };
  return fmt::format("{} -> {}", text(strategy.inputs), text(strategy.outputs));
}

}  // namespace tessera::testing
