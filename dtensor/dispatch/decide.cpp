#include <algorithm>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/dtensor/dispatch/decision.h"
#include "tessera/dtensor/dispatch/meta_run.h"
#include "tessera/dtensor/dispatch/refused_calls.h"
#include "tessera/dtensor/dispatch/result_strides.h"
#include "tessera/dtensor/dispatch/valid_strategies.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/placement/plan.h"

namespace tessera::dispatch {
namespace {

using rules::OpCall;
using rules::OpRule;
using rules::TensorInfo;

class Decider {
 public:
  Decider(const Call& call, std::vector<rules::Considered>* considered)
      : call_(call),
        first_spec_(*call.first_spec),
        mesh_shape_(first_spec_.mesh.mesh().shape()),
        considered_(considered) {}

  DecisionPtr run() {
    refuse_unsupported(call_);
    const rules::RuleFn rule = rules::find_rule(call_.traits.rule_name);
    const bool decided = rule != nullptr && decide_by_rule(rule);
    if (!decided) replicate();
    decision_.by_rule = decided && counts_as_ruled_;
    finish();
    return std::make_shared<const Decision>(std::move(decision_));
  }

 private:
  bool is_out(const TensorArg& entry) const {
    return std::find(call_.traits.out_args.begin(), call_.traits.out_args.end(), entry.arg) !=
           call_.traits.out_args.end();
  }

  // ---- By the operator's rule
  OpCall op_call() {
    OpCall out{.schema = call_.op.schema(),
               .args = call_.args(),
               .inputs = {},
               .outputs = {},
               .first_input = {},
               .device = first_spec_.mesh.device_type()};
    std::size_t next = 0;
    for (std::size_t i = 0; i < call_.traits.num_args; ++i) {
      out.first_input.push_back(out.inputs.size());
      for (; next < call_.tensors.size() && call_.tensors[next].arg == i; ++next) {
        const TensorArg& entry = call_.tensors[next];
        if (is_out(entry)) {
          out_tensors_.push_back(next);
          continue;
        }
        TensorInfo info{.sizes = {}, .dtype = at::kFloat, .defined = entry.tensor->defined()};
        if (info.defined) info = {.sizes = entry.tensor->sizes().vec(), .dtype = entry.tensor->scalar_type()};
        out.inputs.push_back(std::move(info));
        rule_inputs_.push_back(next);
      }
    }
    return out;
  }

  // Returns false when the rule leaves the call to replication.
  bool decide_by_rule(rules::RuleFn rule_fn) {
    OpCall call = op_call();
    if (!out_tensors_.empty() && call_.op.schema().returns().empty()) return false;  // the call writes lists
    meta_results_ = run_on_meta(call_);
    if (meta_results_) {
      for (const MetaResult& r : *meta_results_) call.outputs.push_back(r.info);
      if (meta_results_->empty() && !call_.op.schema().returns().empty()) return false;  // the result is an empty list
    }
    // Where LibTorch has not determined the results it has not checked the arguments either. An operator that it
    // refuses is to throw on every rank alike, which it does replicated. A user's `dim` may be something else.
    if (!meta_results_ && call_.traits.is_of_libtorch() && names_missing_dim(call)) return false;
    OpRule rule = rule_fn(call);
    if (!meta_results_ && rule.outputs.empty()) return false;
    if (!out_tensors_.empty() && !writes_out(rule.kernel)) return false;
    counts_as_ruled_ = !rule.declines;
    prefer_rule_without_elements(rule);
    const std::vector<TensorInfo> outputs = outputs_by(rule);
    if (!call_.traits.is_of_libtorch() || rules::is_replaced(call_.traits.rule_name))
      rules::check_strategies(rule, call.inputs, outputs, call_.traits.name);
    check_written_sizes(outputs);
    std::vector<TensorInfo> inputs = call.inputs;
    drop_invalid_strategies(rule, call_, rule_inputs_, inputs, meta_results_.has_value());
    std::vector<rules::Written> written = written_inputs();
    add_outs(rule, inputs, written);
    const auto choose = [&] {
      const CostModel model = default_cost_model(first_spec_.mesh);
      return rules::choose(rule, inputs, outputs, current(), mesh_shape_, model, written, considered_);
    };
    auto choice = choose();
    if (!choice) {  // written tensors cannot be computed in their own layout
      decision_.write_back = true;
      for (rules::Written& w : written) w.computed_in_copy = true;
      choice = choose();
    }
    if (!choice || !commutes(*choice)) return false;
    adopt(*choice, outputs, rule);
    counts_as_ruled_ = counts_as_ruled_ || decision_.moves.empty();
    return true;
  }

  // Returns what is known of the results. What LibTorch has determined holds, whatever the rule says.
  std::vector<TensorInfo> outputs_by(const OpRule& rule) const {
    if (!meta_results_) return rule.outputs;
    std::vector<TensorInfo> out;
    for (const MetaResult& r : *meta_results_) out.push_back(r.info);
    return out;
  }

  static bool writes_out(std::string_view kernel) {
    return kernel.empty() || find_local_kernel(kernel).traits.writes_out;
  }

  // OpRule::outputs_for decides for all mesh dimensions at once, and may leave pending reductions that do not commute.
  static bool commutes(const rules::Choice& choice) {
    return std::all_of(choice.inputs.begin(), choice.inputs.end(), partials_commute) &&
           std::all_of(choice.outputs.begin(), choice.outputs.end(), partials_commute);
  }

  // LibTorch's composite kernels give wrong sizes for some tensors without elements, and meta tensors the CPU's sizes
  // where a GPU's differ: the rule's sizes are taken instead.
  void prefer_rule_without_elements(const OpRule& rule) {
    if (!meta_results_ || rule.outputs.size() != meta_results_->size()) return;
    for (std::size_t k = 0; k < meta_results_->size(); ++k) {
      MetaResult& result = (*meta_results_)[k];
      const bool empty = std::find(result.info.sizes.begin(), result.info.sizes.end(), 0) != result.info.sizes.end();
      if (!empty || result.info.sizes == rule.outputs[k].sizes) continue;
      result.info.sizes = rule.outputs[k].sizes;
      result.strides = contiguous_strides(result.info.sizes);
    }
  }

  // Returns the index of the result that a written tensor is.
  std::size_t result_of(const TensorArg& entry) const {
    const int result = call_.traits.written_result(entry.arg);
    return result < 0 ? rules::kNoOutput : static_cast<std::size_t>(result);
  }

  std::vector<rules::Written> written_inputs() const {
    std::vector<rules::Written> out;
    for (std::size_t i = 0; i < rule_inputs_.size(); ++i) {
      const TensorArg& entry = call_.tensors[rule_inputs_[i]];
      if (call_.writes(entry)) out.push_back({.input = i, .output = result_of(entry)});
    }
    return out;
  }

  // Throws if a written tensor would get other sizes.
  void check_written_sizes(const std::vector<TensorInfo>& outputs) const {
    for (const TensorArg& entry : call_.tensors) {
      const std::size_t k = call_.writes(entry) ? result_of(entry) : rules::kNoOutput;
      if (k >= outputs.size()) continue;
      const at::IntArrayRef sizes = outputs[k].sizes;
      if (!entry.tensor->defined() || entry.tensor->sizes() == sizes) continue;
      refuse_sizes(call_.traits.name, sizes, entry.tensor->sizes(),
                   is_out(entry) ? "" : ", or use the operator without the trailing underscore");
    }
  }

  // Adds out= tensors as inputs which every strategy lays out as their result. Drops strategies whose local kernel
  // would not write them.
  void add_outs(OpRule& rule, std::vector<TensorInfo>& inputs, std::vector<rules::Written>& written) {
    if (!out_tensors_.empty()) {
      rule.outputs_for = {};
      std::erase_if(rule.strategies, [](const rules::Strategy& s) { return !writes_out(s.kernel); });
    }
    for (std::size_t k = 0; k < out_tensors_.size(); ++k) {
      for (rules::Strategy& strategy : rule.strategies) strategy.inputs.push_back(strategy.outputs.at(k));
      written.push_back({.input = inputs.size(), .output = k});
      inputs.push_back({.sizes = call_.tensors[out_tensors_[k]].tensor->sizes().vec(),
                        .dtype = call_.tensors[out_tensors_[k]].tensor->scalar_type()});
      rule_inputs_.push_back(out_tensors_[k]);
    }
  }

  std::vector<Placements> current() const {
    std::vector<Placements> out;
    for (const std::size_t i : rule_inputs_) {
      const Spec* spec = call_.tensors[i].spec;
      out.push_back(spec != nullptr ? spec->placements : Placements(mesh_shape_.size(), Replicate()));
    }
    return out;
  }

  // Makes the decision that runs the call as `choice` says.
  void adopt(const rules::Choice& choice, const std::vector<TensorInfo>& outputs, const OpRule& rule) {
    decision_.inputs.resize(call_.tensors.size());
    for (std::size_t j = 0; j < rule_inputs_.size(); ++j) plan_move(rule_inputs_[j], choice.inputs[j]);
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (!outputs[k].defined) {
        decision_.outputs.push_back(nullptr);
        continue;
      }
      const std::vector<int64_t>* const told = meta_results_ ? &(*meta_results_)[k].strides : nullptr;
      const std::vector<int64_t> strides = result_strides(call_, order_, outputs[k], told);
      if (meta_results_ && (*meta_results_)[k].offset != 0) {
        decision_.offsets.resize(outputs.size());
        decision_.offsets[k] = (*meta_results_)[k].offset;
      }
      decision_.outputs.push_back(
          intern_spec(first_spec_.mesh, choice.outputs[k], outputs[k].sizes, strides, outputs[k].dtype));
    }
    decision_.make_dense = !meta_results_ || order_ != rules::ResultOrder::kAsMeta || moves_expanded();
    if (!choice.kernel.empty()) {
      const LocalKernelEntry entry = find_local_kernel(choice.kernel);
      decision_.kernel = entry.kernel;
      decision_.check = entry.traits.check;
      kernel_communicates_ = entry.traits.communicates;
      decision_.joins = kernel_communicates_ && choice.joins;
      decision_.communicates |= decision_.joins;
      decision_.make_dense |= entry.traits.rearranges;
      kernel_is_operator_ = entry.traits.makes_contiguous;
    }
    localize(rule);
    if (rule.halos) plan_halos(*rule.halos);
  }

  // Says whether an input that is redistributed has been expanded. Its piece is then row-major, which its strides do
  // not say, and results would have the order of the piece.
  bool moves_expanded() const {
    return !call_.traits.view && std::ranges::any_of(decision_.moves, [](const Decision::Move& move) {
      return std::ranges::find(move.from->strides, 0) != move.from->strides.end();
    });
  }

  // Prepares the halo exchange if a dimension along which windows lie is sharded.
  void plan_halos(const rules::Halos& halos) {
    const auto input = [&](std::size_t j) -> const SpecPtr& { return decision_.inputs[rule_inputs_[j]]; };
    const Spec& computed = halos.anchor ? *input(*halos.anchor) : *decision_.outputs[0];
    const auto cuts = [&](const Placement& p) {
      return p.is_shard() && std::ranges::find(halos.dims, p.tensor_dim()) != halos.dims.end();
    };
    if (std::ranges::none_of(computed.placements, cuts)) return;
    std::vector<std::size_t> tensors;
    std::vector<SpecPtr> fetched;
    for (const std::size_t j : halos.inputs) {
      tensors.push_back(rule_inputs_[j]);
      fetched.push_back(input(j));
    }
    decision_.halos =
        std::make_shared<const Decision::Halos>(Decision::Halos{std::move(tensors), {halos, fetched, computed}});
    decision_.communicates |= decision_.halos->exchange.communicates();
  }

  void localize(const OpRule& rule) {
    if (decision_.outputs.empty() || decision_.outputs[0] == nullptr) return;
    const Spec& result = *decision_.outputs[0];
    if (rule.size_arg >= 0 && result.sharded) {
      decision_.local_args.push_back({static_cast<std::size_t>(rule.size_arg), result.local_sizes});
    }
    if (rule.stride_arg >= 0 && result.sharded) {
      decision_.local_args.push_back({static_cast<std::size_t>(rule.stride_arg), dense_strides(result)});
    }
  }

  // ---- Without a rule
  void replicate() {
    const Placements all(mesh_shape_.size(), Replicate());
    decision_.inputs.assign(call_.tensors.size(), nullptr);
    decision_.moves.clear();
    for (std::size_t i = 0; i < call_.tensors.size(); ++i) {
      const TensorArg& entry = call_.tensors[i];
      if (entry.spec == nullptr) continue;
      plan_move(i, all);
      if (call_.writes(entry) && entry.spec->placements != all) decision_.write_back = true;
    }
    if (first_spec_.mesh.is_member()) {
      decision_.outputs_from_local = true;
      return;
    }
    if (!meta_results_) meta_results_ = run_on_meta(call_);
    if (!meta_results_) {
      throw std::runtime_error(
          fmt::format("{}: this rank is outside the mesh {} and the operator tells no result's shape "
                      "without running; run it on the mesh's ranks only",
                      call_.traits.name, first_spec_.mesh.to_string()));
    }
    for (const MetaResult& r : *meta_results_) {
      decision_.outputs.push_back(
          r.info.defined ? intern_spec(first_spec_.mesh, all, r.info.sizes, r.strides, r.info.dtype) : nullptr);
    }
  }

  // Sets the placements that a tensor is redistributed to, and records the move if they are not its own.
  void plan_move(std::size_t tensor, const Placements& placements) {
    const TensorArg& entry = call_.tensors[tensor];
    if (entry.spec == nullptr) return;
    SpecPtr to = with_placements(*entry.spec, placements);
    if (entry.spec->placements != placements) {
      check_partials(placements, entry.spec->dtype, call_.traits.name);
      RoutePtr route = route_between(*entry.spec, placements);
      decision_.moved |= !route->plan().steps().empty();
      decision_.communicates |= route->communicates();
      SpecPtr from = with_placements(*entry.spec, entry.spec->placements);
      decision_.moves.push_back({.tensor = tensor, .from = std::move(from), .to = to, .route = std::move(route)});
    }
    decision_.inputs[tensor] = std::move(to);
  }

  void finish() {
    decision_.first_spec = with_placements(first_spec_, first_spec_.placements);
    for (const auto& [from, to] : moves_back(call_, decision_)) {
      decision_.communicates |= route_between(*from, to->placements)->communicates();
    }
    for (const SpecPtr& spec : decision_.inputs)
      decision_.ranks_differ |= spec != nullptr && (spec->sharded || spec->partial);
    bool empty = !decision_.outputs.empty() && !decision_.outputs_from_local;
    for (const SpecPtr& spec : decision_.outputs) {
      if (spec == nullptr) continue;
      decision_.ranks_differ |= spec->sharded || spec->partial;
      empty &= spec->local_numel() == 0 && spec->numel() != 0;
    }
    decision_.nothing_here = empty && !call_.traits.view && !kernel_communicates_;
    decision_.operator_alone = first_spec_.mesh.is_member() && !decision_.nothing_here && !decision_.write_back &&
                               decision_.moves.empty() && decision_.halos == nullptr && kernel_is_operator_ &&
                               !decision_.outputs_from_local && call_.traits.out_args.empty() && !draws(call_) &&
                               !call_.traits.is_view_as_real &&
                               !(call_.traits.view && decision_.make_dense);  // made dense, it might be a copy
  }

  const Call& call_;
  const Spec& first_spec_;
  const std::vector<int64_t>& mesh_shape_;
  std::vector<rules::Considered>* const considered_;
  Decision decision_;
  bool kernel_is_operator_ = true;                       // on contiguous pieces; see Decision::operator_alone
  bool kernel_communicates_ = false;                     // every rank runs it, also for an empty piece
  bool counts_as_ruled_ = true;                          // the rule fits these arguments, or nothing is redistributed
  std::optional<std::vector<MetaResult>> meta_results_;  // the results on the meta device; see run_on_meta
  const rules::ResultOrder order_ = rules::result_order(call_.traits.name, first_spec_.mesh.device().is_cpu());
  std::vector<std::size_t> rule_inputs_;  // for each input of the rule, its index in call_.tensors
  std::vector<std::size_t> out_tensors_;  // out= tensors, as indexes in call_.tensors
};

}  // namespace

std::vector<std::pair<SpecPtr, SpecPtr>> moves_back(const Call& call, const Decision& decision) {
  std::vector<std::pair<SpecPtr, SpecPtr>> out;
  for (std::size_t i = 0; decision.write_back && i < call.tensors.size(); ++i) {
    const TensorArg& entry = call.tensors[i];
    if (entry.spec == nullptr || !call.writes(entry)) continue;
    out.emplace_back(decision.inputs[i], with_placements(*entry.spec, entry.spec->placements));
  }
  return out;
}

DecisionPtr decide(const Call& call, std::vector<rules::Considered>* considered) {
  return Decider(call, considered).run();
}

}  // namespace tessera::dispatch
