#include "tessera/dtensor/dispatch/communication_text.h"

#include <algorithm>

#include <fmt/format.h>

namespace tessera::dispatch {

std::string join_text(const Decision& decision) {
  const auto cut = std::ranges::find_if(decision.inputs, [](const SpecPtr& spec) { return spec && spec->sharded; });
  return fmt::format("the ranks join what each of them finds in its piece of {}",
                     to_string(cut == decision.inputs.end() ? *decision.first_spec : **cut));
}

std::string communication_text(const Call& call, const Decision& decision) {
  std::string out;
  for (const Decision::Move& move : decision.moves) {
    const Spec& from = *call.tensors[move.tensor].spec;
    if (!move.route->communicates()) continue;
    out += fmt::format("; {} would go to {} by {}", to_string(from), to_string(move.to->placements),
                       move.route->plan().to_string());
  }
  if (decision.halos && decision.halos->exchange.communicates()) {
    const Spec& spec = *decision.inputs[decision.halos->tensors[0]];
    out += fmt::format("; of {} a rank needs {}", to_string(spec), decision.halos->exchange.to_string());
  }
  for (const auto& [from, to] : moves_back(call, decision)) {
    const RoutePtr route = route_between(*from, to->placements);
    if (!route->communicates()) continue;
    out += fmt::format("; what is written into {} is computed as {}, and goes back by {}", to_string(*to),
                       to_string(from->placements), route->plan().to_string());
  }
  if (decision.joins) {
    const bool has_sum = call.op.schema().name().find("nll_loss") != std::string::npos;
    out += fmt::format("; {}: {}, or end Strict before the call", join_text(decision),
                       has_sum ? "use reduction sum and divide" : "redistribute it first");
  }
  const auto is_plain_number = [](const TensorArg& entry) {
    const at::Tensor& t = *entry.tensor;
    return t.defined() && !detail::is_dtensor(t) && t.numel() == 1 && !t.unsafeGetTensorImpl()->is_wrapped_number();
  };
  if (has_zero_or_nonfinite_number(call) && std::ranges::any_of(call.tensors, is_plain_number)) {
    out +=
        "; a plain tensor of one element may be 0 or not finite, by which no pending sum is scaled: give a number, "
        "such as x * 0.5";
  }
  return out;
}

}  // namespace tessera::dispatch
