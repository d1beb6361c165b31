#include "tessera/dtensor/dispatch/explain_op.h"

#include <algorithm>
#include <ostream>
#include <stdexcept>

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include "tessera/dtensor/dispatch/call.h"
#include "tessera/dtensor/dispatch/communication_text.h"
#include "tessera/dtensor/dispatch/copied_views.h"
#include "tessera/dtensor/dispatch/decision.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dispatch/gather.h"
#include "tessera/dtensor/dispatch/local_kernel.h"

namespace tessera {
namespace {

c10::OperatorHandle find_operator(const std::string& op) {
  const auto dot = op.find('.');
  const auto found =
      c10::Dispatcher::singleton().findSchema({op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1)});
  if (found) return *found;
  throw std::invalid_argument(
      fmt::format("explain_op: no operator {}; give namespace, name and overload, as in aten::add.Tensor", op));
}

torch::jit::Stack with_defaults(const c10::FunctionSchema& schema, std::vector<c10::IValue> args) {
  torch::jit::Stack out(std::make_move_iterator(args.begin()), std::make_move_iterator(args.end()));
  schema.checkAndNormalizeInputs(out, {});
  return out;
}

void refuse_composite(const c10::OperatorHandle& op, const dispatch::OpTraits& traits, const std::string& name) {
  if (dispatch::is_foreach(traits.rule_name)) {
    throw std::invalid_argument(fmt::format(
        "explain_op: {} acts on the pieces of its lists, which are redistributed to the first list's layouts; "
        "there is nothing to choose",
        name));
  }
  const bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  const DecompositionEntry decomposition = find_decomposition(op.schema().name());
  if (!composite && (decomposition.run == nullptr || decomposition.calls != DecomposedCalls::kAll)) return;
  throw std::invalid_argument(fmt::format(
      "explain_op: {} is carried out by other operators (aten::matmul by aten::mm or tessera::dense, for one), "
      "at least where ranks hold pieces; explain the one that CommCounter names",
      name));
}

std::vector<Placements> placements_of(const std::vector<SpecPtr>& specs) {
  std::vector<Placements> out;
  out.reserve(specs.size());
  for (const SpecPtr& spec : specs) out.push_back(spec == nullptr ? Placements() : spec->placements);
  return out;
}

std::string texts(const std::vector<Placement>& placements) {
  std::string out;
  for (const Placement& p : placements) out += (out.empty() ? "" : " ") + to_string(p);
  return out;
}

}  // namespace

std::string OpExplanation::to_string() const {
  std::string out = fmt::format("{}: {}\n", op, by_rule ? "by its rule" : "no rule fits; every input to Replicate");
  for (const OpCandidate& c : candidates) {
    out +=
        fmt::format("  {} mesh dimension {}: {} -> {}  {:.4g} us{}\n", c.chosen ? '*' : ' ', c.mesh_dim,
                    texts(c.inputs), texts(c.outputs), c.microseconds, c.refused.empty() ? "" : "  not: " + c.refused);
  }
  const auto chosen = [](const OpCandidate& c) { return c.chosen; };
  if (by_rule && std::none_of(candidates.begin(), candidates.end(), chosen))
    out += "  * every rank views its piece where it is\n";
  for (const std::string& step : steps) out += "  " + step + '\n';
  for (const Placements& p : outputs) out += "  gives " + tessera::to_string(p) + '\n';
  return out;
}

std::ostream& operator<<(std::ostream& out, const OpExplanation& explanation) { return out << explanation.to_string(); }

OpExplanation explain_op(const std::string& op, std::vector<c10::IValue> args) {
  const c10::OperatorHandle handle = find_operator(op);
  const dispatch::OpTraits traits(handle);
  refuse_composite(handle, traits, op);
  torch::jit::Stack stack = with_defaults(handle.schema(), std::move(args));
  dispatch::Call call = dispatch::read_call(handle, traits, stack, dispatch::PlainTensors::kTaken);
  const dispatch::CopiedViewWrites copies(call);
  std::vector<rules::Considered> considered;
  const auto decide = [&](const dispatch::Call& c) {
    considered.clear();
    return dispatch::decide(c, &considered);
  };
  OpExplanation out{.op = op};
  const dispatch::DecisionPtr decision = dispatch::explain_gathered(call, decide, out.steps);
  out.by_rule = decision->by_rule;
  for (rules::Considered& c : considered) {
    out.candidates.push_back({.mesh_dim = c.mesh_dim,
                              .inputs = std::move(c.strategy.inputs),
                              .outputs = std::move(c.strategy.outputs),
                              .microseconds = c.microseconds,
                              .refused = std::move(c.refused),
                              .chosen = c.chosen});
  }
  out.inputs = placements_of(decision->inputs);
  out.outputs = placements_of(decision->outputs);
  for (const dispatch::Decision::Move& move : decision->moves) {
    out.steps.push_back(fmt::format("{} to {} by {}", to_string(*call.tensors[move.tensor].spec),
                                    tessera::to_string(move.to->placements), move.route->plan().to_string()));
  }
  if (decision->halos) {
    out.steps.push_back("halos: " + decision->halos->exchange.to_string());
  }
  if (decision->joins) out.steps.push_back(dispatch::join_text(*decision));
  for (std::string& way : copies.ways_back()) out.steps.push_back(std::move(way));
  return out;
}

}  // namespace tessera
