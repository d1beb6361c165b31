#include "tessera/dtensor/dispatch/execute.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/communication_text.h"
#include "tessera/dtensor/dispatch/gather.h"
#include "tessera/dtensor/dispatch/viewed_tensor.h"
#include "tessera/dtensor/dispatch/written_arguments.h"
#include "tessera/dtensor/random/draw_guard.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/failing.h"

namespace tessera::dispatch {
namespace {

using torch::jit::Stack;

// Runs one call.
class Execution {
 public:
  Execution(const Call& call, const Decision& decision)
      : call_(call), decision_(decision), mesh_(decision.first_spec->mesh), written_(call, decision) {}

  void run() {
    if (call_.traits.view) {
      viewed_.emplace(call_, decision_);
      c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
    }
    bring_inputs();
    written_.prepare(locals_);
    if (call_.traits.keeps_contract && detail::is_dtensor(*call_.tensors[0].tensor)) keep_contract();
    if (call_.contract_from_parameters) contract_ = call_.contract_from_parameters;
    std::string path;
    std::optional<World::Scope> scope;
    if (decision_.joins) {
      const std::string* const given = contract_path(call_);
      if (given != nullptr) path = *given;
      scope.emplace(mesh_.world(), call_.traits.name.c_str(), given == nullptr ? nullptr : &path);
    }
    // localize_stack drops the wrappers from the stack; what is needed of them later is in the decision, in members and
    // above.
    localize_stack();
    if (decision_.check != nullptr && mesh_.is_member()) check();
    if (!mesh_.is_member() || decision_.nothing_here) {
      if (call_.traits.random) next_draw_key();  // so that later draws agree on all ranks
      empty_results();
    } else {
      run_local();
    }
    if (mesh_.is_member()) {
      written_.refuse_resized(locals_);
      written_.write_back(locals_);
    }
    written_.note_writes();
    wrap();
  }

 private:
  // ---- Before the operator
  void bring_inputs() {
    locals_.reserve(call_.tensors.size());
    for (const TensorArg& entry : call_.tensors) {
      args_.push_back(entry.arg);
      const at::Tensor& t = *entry.tensor;
      if (!t.defined()) {
        locals_.emplace_back();
      } else {
        locals_.push_back(detail::is_dtensor(t) ? detail::meta(t).local() : with_memory(t));
      }
    }
    if (viewed_) viewed_->prepare(locals_[0]);
    move_inputs();
    if (viewed_) viewed_->take(locals_[0]);
  }

  void move_inputs() {
    if (decision_.moves.empty() && !decision_.halos) return;
    std::optional<World::Scope> scope;
    if (decision_.communicates) scope.emplace(mesh_.world(), call_.traits.name.c_str(), contract_path(call_));
    for (const Decision::Move& move : decision_.moves) {
      if (move.route->plan().steps().empty()) continue;  // the pieces are the same
      at::Tensor& local = locals_[move.tensor];
      local = in_memory_order(run_route(*move.route, move.to->mesh, local), *move.to);
    }
    if (decision_.halos && mesh_.is_member()) fetch(*decision_.halos);
  }

  // Every rank of the mesh takes part, also one that computes nothing.
  void fetch(const Decision::Halos& halos) {
    std::vector<at::Tensor> held;
    for (const std::size_t i : halos.tensors) held.push_back(locals_[i]);
    const std::vector<at::Tensor> needed = halos.exchange.run(mesh_, held);
    for (std::size_t k = 0; k < needed.size(); ++k) locals_[halos.tensors[k]] = needed[k];
    fetched_.emplace(Fetched{.halos = halos.exchange.halos(), .held = std::move(held)});
  }

  void keep_contract() { contract_ = inherited(detail::meta(*call_.tensors[0].tensor).contract, call_.traits.view); }

  void localize_stack() {
    const std::size_t count = locals_.size();
    for (std::size_t next = 0; next < count;) {
      const std::size_t arg = args_[next];
      at::IValue& value = call_.arg(arg);
      if (detail::is_tensor_list(value)) {
        detail::replace_tensors(value, [&](const at::Tensor&, std::size_t) { return locals_[next++]; });
      } else {
        if (locals_[next].defined()) value = locals_[next];
        ++next;
      }
    }
    for (const auto& [arg, ints] : decision_.local_args) call_.arg(arg) = ints;
  }

  // ---- The operator itself
  void run_local() {
    std::optional<detail::DrawGuard> draw;
    if (call_.traits.random) draw_key_ = next_draw_key();
    // A local kernel draws from the key itself.
    if (draw_key_ && decision_.kernel == nullptr) {
      if (const int arg = call_.traits.generator_arg; arg >= 0) {
        call_.arg(static_cast<std::size_t>(arg)) = detail::generator_of(mesh_.device(), *draw_key_);
      } else {
        draw.emplace(mesh_.device(), *draw_key_);
      }
    }
    const BelowAutograd below;
    const auto run = [this] {
      if (decision_.kernel != nullptr) {
        run_kernel();
      } else {
        call_.op.callBoxed(call_.stack);
      }
    };
    if (decision_.ranks_differ) {
      mesh_.world().guard(call_.traits.name, run);
    } else {
      run();
    }
  }

  LocalCall local_call() const {
    return {.op = call_.op,
            .inputs = decision_.inputs,
            .outputs = decision_.outputs,
            .draw = draw_key_.value_or(detail::DrawKey()),
            .fetched = fetched_ ? &*fetched_ : nullptr};
  }

  void check() const {
    const BelowAutograd below;
    Stack local(call_.stack.begin() + static_cast<std::ptrdiff_t>(call_.base), call_.stack.end());
    decision_.check(local_call(), local);
  }

  // Runs the local kernel on a stack of its own.
  void run_kernel() {
    Stack local(std::make_move_iterator(call_.stack.begin() + static_cast<std::ptrdiff_t>(call_.base)),
                std::make_move_iterator(call_.stack.end()));
    decision_.kernel(local_call(), local);
    if (local.size() != call_.op.schema().returns().size()) {
      throw std::logic_error(
          fmt::format("{}: its local kernel has left {} values on the stack, and the operator has {} results; drop the "
                      "arguments and push each result",
                      call_.traits.name, local.size(), call_.op.schema().returns().size()));
    }
    call_.stack.resize(call_.base);
    for (at::IValue& value : local) call_.stack.push_back(std::move(value));
  }

  // Returns what this call draws from; nullopt for a dropout of probability 0, which draws nothing.
  std::optional<detail::DrawKey> next_draw_key() {
    if (!draws(call_)) return std::nullopt;
    std::optional<at::Generator> user;
    if (call_.traits.generator_arg >= 0) {
      at::IValue& generator = call_.arg(static_cast<std::size_t>(call_.traits.generator_arg));
      if (generator.isGenerator()) user = generator.toGenerator();
      generator = at::IValue();
    }
    return detail::next_draw(mesh_.world(), user);
  }

  // Makes the results of a rank that has no part of them.
  void empty_results() {
    Stack& local = call_.stack;
    local.resize(call_.base);
    std::size_t next = 0;
    const auto empty = [&] {
      if (next >= decision_.outputs.size()) {
        throw std::runtime_error(fmt::format(
            "{}: this rank is outside the mesh {} and cannot know the result; call it on the mesh's ranks alone",
            call_.traits.name, mesh_.to_string()));
      }
      const SpecPtr& spec = decision_.outputs[next++];
      if (spec == nullptr) return at::Tensor();
      return at::empty(spec->local_sizes, at::TensorOptions(spec->dtype).device(mesh_.device()));
    };
    for (const c10::Argument& result : call_.op.schema().returns()) {
      if (result.type()->kind() == c10::TypeKind::TensorType) {
        local.emplace_back(empty());
      } else if (result.type()->kind() == c10::TypeKind::ListType) {
        c10::List<at::Tensor> list;
        while (next < decision_.outputs.size()) list.push_back(empty());
        local.emplace_back(std::move(list));
      } else {
        throw std::runtime_error(fmt::format(
            "{}: this rank is outside the mesh {} and has no value to give; call it on the mesh's ranks alone",
            call_.traits.name, mesh_.to_string()));
      }
    }
  }

  // ---- After the operator
  void wrap() {
    const std::size_t results = call_.op.schema().returns().size();
    std::size_t next_output = 0;
    for (std::size_t i = 0; i < results; ++i) {
      at::IValue& value = call_.stack[call_.base + i];
      if (value.isTensor()) {
        if (const at::Tensor* const written = written_.result(i)) {
          value = *written;
          ++next_output;
        } else {
          value = wrap_one(value.toTensor(), next_output++);
        }
      } else if (value.isTensorList()) {
        detail::replace_tensors(value, [&](const at::Tensor& t, std::size_t) { return wrap_one(t, next_output++); });
      }
    }
  }

  at::Tensor wrap_one(const at::Tensor& local, std::size_t output) {
    if (!local.defined()) return local;
    SpecPtr spec;
    if (decision_.outputs_from_local) {
      spec = replicated_spec(mesh_, local);
    } else {
      spec = decision_.outputs.at(output);
      if (spec == nullptr) return {};
      if (mesh_.is_member()) detail::check_local(local, *spec, call_.traits.name.c_str());
    }
    at::Tensor piece = decision_.make_dense ? as_dense(local, *spec) : local;
    if (viewed_) piece = viewed_->piece_of(piece, *spec);
    at::Tensor out =
        detail::wrap(piece, std::move(spec), viewed_ ? std::optional(viewed_->is_inference()) : std::nullopt);
    if (contract_) detail::meta(out).contract = contract_;
    if (viewed_) viewed_->make_view(out, piece, output);
    return out;
  }

  const Call& call_;
  const Decision& decision_;
  const DeviceMesh& mesh_;
  Pieces locals_;
  c10::SmallVector<std::size_t, 6> args_;  // the schema argument of each local
  WrittenArguments written_;
  ContractPtr contract_;
  std::optional<Fetched> fetched_;
  std::optional<detail::DrawKey> draw_key_;
  std::optional<ViewedTensor> viewed_;  // nullopt if the call is no view
};

// Says whether the call is a view of a parameter that is cut to save memory, whose communication Strict allows.
bool views_gathered(const Call& call) {
  const at::Tensor& first = *call.tensors[0].tensor;
  return call.traits.view && detail::is_dtensor(first) && is_gathered(detail::meta(first));
}

}  // namespace

void execute(const Call& call, const Decision& decision) {
  if (decision.communicates && !views_gathered(call)) {
    detail::implicit_communication(call.traits.name, [&] { return communication_text(call, decision); });
  }
  try {
    Execution(call, decision).run();
  } catch (...) {
    rethrow_failing_if_own(decision.first_spec->mesh.world(), call.traits.name.c_str());
  }
}

}  // namespace tessera::dispatch
