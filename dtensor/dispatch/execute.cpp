#include "tessera/dtensor/dispatch/execute.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/AutogradState.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/core/wrapper.h"
#include "tessera/dtensor/dispatch/gather.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/random/draw_guard.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/failing.h"

namespace tessera::dispatch {
namespace {

using torch::jit::Stack;

std::string moves_of(const Call& call, const Decision& decision) {
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
  if (out.empty() && decision.first_spec != nullptr) {
    out = fmt::format(
        "; the ranks add up what they computed of {} by all_reduce: use reduction sum and divide, or end Strict before "
        "it",
        to_string(*decision.first_spec));
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

// Says whether two tensors have an element of memory in common. Of tensors with gaps that reach into each other this
// counts the elements; of those with elements of unlike sizes it is taken for granted.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const at::MemOverlapStatus status = at::get_overlap_status(a, b);
  if (status != at::MemOverlapStatus::TooHard) return status != at::MemOverlapStatus::No;
  if (!a.is_alias_of(b) || a.numel() == 0 || b.numel() == 0) return false;
  if (a.itemsize() != b.itemsize()) return true;
  const auto end = [](const at::Tensor& t) {
    int64_t last = t.storage_offset();
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    return last + 1;
  };
  if (a.storage_offset() >= end(b) || b.storage_offset() >= end(a)) return false;
  const int64_t first = std::min(a.storage_offset(), b.storage_offset());
  const at::Tensor taken = at::zeros({std::max(end(a), end(b)) - first}, at::kByte);
  const auto part = [&](const at::Tensor& t) {
    return taken.as_strided(t.sizes(), t.strides(), t.storage_offset() - first);
  };
  part(a).fill_(1);
  return part(b).sum().item<int64_t>() > 0;
}

// Runs one call.
class Execution {
 public:
  Execution(const Call& call, const Decision& decision)
      : call_(call), decision_(decision), mesh_(decision.first_spec->mesh) {}

  void run() {
    if (call_.traits.view) {
      find_viewed();
      c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
      inference_ = call_.tensors[0].tensor->is_inference();
    }
    bring_inputs();
    keep_written();
    if (call_.traits.keeps_contract && detail::is_dtensor(*call_.tensors[0].tensor)) keep_contract();
    if (call_.contract_from_parameters) contract_ = call_.contract_from_parameters;
    // localize_stack drops the wrappers from the stack; what is needed of them later is in the decision and in members.
    localize_stack();
    if (!mesh_.is_member() || decision_.nothing_here) {
      if (call_.traits.random) next_draw_key();  // so that later draws agree on all ranks
      empty_results();
    } else {
      run_local();
    }
    if (mesh_.is_member()) refuse_resized();
    if (writes_in_copies()) write_back();
    for (const auto& [index, wrapper] : written_) detail::note_write(detail::meta(wrapper));
    wrap();
  }

 private:
  // Says whether written arguments are computed in copies. They are, too, where LibTorch may resize what it writes,
  // since the results' sizes are not known beforehand.
  bool writes_in_copies() const { return decision_.write_back || decision_.outputs_from_local; }

  bool copies_conjugate() const {
    if (!call_.traits.is_view_as_real) return false;
    const at::Tensor& viewed = *call_.tensors[0].tensor;
    return detail::is_dtensor(viewed) && detail::meta(viewed).local().is_conj();
  }

  // Finds what a view views. A view of redistributed pieces is a copy, and so is a view of a copy.
  void find_viewed() {
    const at::Tensor& viewed = *call_.tensors[0].tensor;
    if (!detail::is_dtensor(viewed)) return;
    const detail::Meta& meta = detail::meta(viewed);
    viewed_piece_ = meta.local();
    bytes_before_ = detail::bytes_before(viewed);
    counters_ = meta.write_counters();
    writes_ = counters_->sum();
    if (meta.is_copied_view()) {
      copy_ = meta.copy;
    } else if (decision_.moved || copies_conjugate()) {
      copy_ = copy_of_viewed();
    }
  }

  // Says whether a result is in other memory than the viewed piece, for whatever reason.
  bool lies_apart(const at::Tensor& piece) const {
    return piece.numel() > 0 && piece.has_storage() && viewed_piece_.has_storage() && !piece.is_alias_of(viewed_piece_);
  }

  detail::ViewCopy copy_of_viewed() const {
    return {.made_by = &call_.traits.name, .viewed = *counters_, .writes = writes_};
  }

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
    if (copies_conjugate()) locals_[0] = locals_[0].resolve_conj();
    move_inputs();
    if (viewed_piece_.defined()) align_elements();
  }

  void move_inputs() {
    if (decision_.moves.empty() && !decision_.halos) return;
    std::optional<World::Scope> scope;
    if (decision_.communicates) scope.emplace(mesh_.world(), call_.traits.name.c_str(), contract_path(call_));
    for (const Decision::Move& move : decision_.moves) {
      at::Tensor& local = locals_[move.tensor];
      local = in_memory_order(run_route(*move.route, move.to->mesh, local), *move.to);
    }
    if (decision_.halos && mesh_.is_member()) fetch(*decision_.halos);
  }

  // Copies a piece whose elements cannot be viewed as a wider dtype, though those of the whole can: it begins between
  // two elements of the view, or its rows do.
  void align_elements() {
    if (decision_.outputs.empty() || decision_.outputs[0] == nullptr) return;
    const auto size = static_cast<int64_t>(c10::elementSize(decision_.outputs[0]->dtype));
    at::Tensor& local = locals_[0];
    const int64_t ratio = size / static_cast<int64_t>(local.itemsize());
    if (ratio <= 1) return;
    bool aligned = local.storage_offset() % ratio == 0;
    for (int64_t d = 0; d + 1 < local.dim(); ++d) aligned = aligned && local.stride(d) % ratio == 0;
    if (!aligned) local = local.clone(at::MemoryFormat::Contiguous);
  }

  // Every rank of the mesh takes part, also one that computes nothing.
  void fetch(const Decision::Halos& halos) {
    std::vector<at::Tensor> held;
    for (const std::size_t i : halos.tensors) held.push_back(locals_[i]);
    const std::vector<at::Tensor> needed = halos.exchange.run(mesh_, held);
    for (std::size_t k = 0; k < needed.size(); ++k) locals_[halos.tensors[k]] = needed[k];
    fetched_.emplace(Fetched{.halos = halos.exchange.halos(), .held = std::move(held)});
  }

  // Keeps the wrappers of written arguments, which an in-place operator returns.
  void keep_written() {
    for (const std::size_t arg : call_.traits.written_args) {
      for (std::size_t i = 0; i < call_.tensors.size(); ++i) {
        if (call_.tensors[i].arg != arg || !call_.tensors[i].tensor->defined()) continue;
        if (writes_in_copies()) copy_written(i);
        written_.push_back({i, *call_.tensors[i].tensor});
      }
    }
  }

  // An argument that is written as two of them has one copy. Of two that overlap in another way each would be written
  // without what is written into the other.
  void copy_written(std::size_t i) {
    const at::Tensor& piece = detail::meta(*call_.tensors[i].tensor).local();
    for (const WrittenTensor& other : written_) {
      const at::Tensor& others = detail::meta(other.wrapper).local();
      if (!overlap(piece, others)) continue;
      const bool is_same = call_.tensors[i].spec == call_.tensors[other.index].spec &&
                           decision_.inputs[i] == decision_.inputs[other.index] &&
                           piece.strides() == others.strides() && piece.storage_offset() == others.storage_offset() &&
                           piece.is_conj() == others.is_conj() && piece.is_neg() == others.is_neg();
      if (!is_same) failing(mesh_.world(), call_.traits.name.c_str(), [this] { refuse_overlap(); });
      locals_[i] = locals_[other.index];
      return;
    }
    if (locals_[i].is_alias_of(piece)) locals_[i] = locals_[i].clone();
  }

  [[noreturn]] void refuse_overlap() const {
    throw std::invalid_argument(
        fmt::format("{}: two arguments that it writes overlap in memory, and it computes in copies of both, of which "
                    "each would lose what is written into the other; clone one of them, or write them by two calls",
                    call_.traits.name));
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

  // Runs the local kernel on a stack of its own.
  void run_kernel() {
    Stack local(std::make_move_iterator(call_.stack.begin() + static_cast<std::ptrdiff_t>(call_.base)),
                std::make_move_iterator(call_.stack.end()));
    decision_.kernel({.op = call_.op,
                      .inputs = decision_.inputs,
                      .outputs = decision_.outputs,
                      .draw = draw_key_.value_or(detail::DrawKey()),
                      .fetched = fetched_ ? &*fetched_ : nullptr},
                     local);
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
    const int dropout = call_.traits.dropout_arg;
    if (dropout >= 0 && call_.arg(static_cast<std::size_t>(dropout)).toDouble() == 0) return std::nullopt;
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

  // Throws if LibTorch has resized a written tensor. Where the result's shape was not known before, this is the first
  // moment that shows it, on every rank.
  void refuse_resized() const {
    for (const auto& [index, wrapper] : written_) {
      const Spec& spec = *decision_.inputs[index];
      if (locals_[index].sizes() == at::IntArrayRef(spec.local_sizes)) continue;
      refuse_sizes(call_.traits.name, locals_[index].sizes(), spec.sizes);
    }
  }

  // ---- After the operator
  void write_back() {
    if (!mesh_.is_member()) return;
    const World::Scope scope(mesh_.world(), call_.traits.name.c_str());
    for (const auto& [index, wrapper] : written_) {
      const detail::Meta& meta = detail::meta(wrapper);
      const at::AutoDispatchBelowADInplaceOrView below;
      meta.local().copy_(redistribute_local(locals_[index], *decision_.inputs[index], meta.spec->placements));
    }
  }

  // Returns the written tensor that the call's result `i` is, or nullptr.
  const at::Tensor* written_as(std::size_t i) const {
    const OpTraits& traits = call_.traits;
    for (const WrittenTensor& each : written_) {
      const auto at = std::ranges::find(traits.written_args, call_.tensors[each.index].arg);
      const int result = traits.written_results.at(static_cast<std::size_t>(at - traits.written_args.begin()));
      if (result == static_cast<int>(i)) return &each.wrapper;
    }
    return nullptr;
  }

  void wrap() {
    const std::size_t results = call_.op.schema().returns().size();
    std::size_t next_output = 0;
    for (std::size_t i = 0; i < results; ++i) {
      at::IValue& value = call_.stack[call_.base + i];
      if (value.isTensor()) {
        if (const at::Tensor* const written = written_as(i)) {
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
    const at::Tensor piece = decision_.make_dense ? as_dense(local, *spec) : local;
    at::Tensor out = detail::wrap(piece, std::move(spec), inference_);
    if (viewed_piece_.defined()) detail::place_view(out, bytes_before_, decision_.offset(output));
    if (contract_) detail::meta(out).contract = contract_;
    if (counters_) make_view(out, piece);
    return out;
  }

  // Makes `out` a view, or records that it is a copy. LibTorch gives a copy too the viewed tensor's version, so a write
  // to either counts as one to both.
  void make_view(const at::Tensor& out, const at::Tensor& piece) {
    detail::Meta& made = detail::meta(out);
    if (copy_.made_by == nullptr && lies_apart(piece)) copy_ = copy_of_viewed();
    if (copy_.made_by == nullptr) {
      made.share_writes(*counters_);
    } else {
      made.copy = copy_;
      made.set_version(counters_->version);
    }
  }

  struct WrittenTensor {
    std::size_t index;  // index in call.tensors
    at::Tensor wrapper;
  };

  const Call& call_;
  const Decision& decision_;
  const DeviceMesh& mesh_;
  c10::SmallVector<at::Tensor, 6> locals_;
  c10::SmallVector<std::size_t, 6> args_;  // the schema argument of each local
  c10::SmallVector<WrittenTensor, 2> written_;
  ContractPtr contract_;
  std::optional<Fetched> fetched_;
  std::optional<detail::DrawKey> draw_key_;
  at::Tensor viewed_piece_;                        // the viewed tensor's piece; undefined if the call is no view
  int64_t bytes_before_ = 0;                       // the viewed tensor's
  std::optional<detail::WriteCounters> counters_;  // the viewed tensor's; nullopt if the call is no view of a DTensor
  uint32_t writes_ = 0;                            // their sum when the call began
  detail::ViewCopy copy_;          // what the results record; made_by is nullptr unless they are copied views
  std::optional<bool> inference_;  // whether the viewed tensor is an inference tensor; nullopt if the call is no view
};

// Says whether the call is a view of a parameter that is cut to save memory, whose communication Strict allows.
bool views_gathered(const Call& call) {
  const at::Tensor& first = *call.tensors[0].tensor;
  return call.traits.view && detail::is_dtensor(first) && is_gathered(detail::meta(first));
}

}  // namespace

void execute(const Call& call, const Decision& decision) {
  if (decision.communicates && !views_gathered(call)) {
    detail::implicit_communication(call.traits.name, [&] { return moves_of(call, decision); });
  }
  try {
    Execution(call, decision).run();
  } catch (...) {
    rethrow_failing_if_own(decision.first_spec->mesh.world(), call.traits.name.c_str());
  }
}

}  // namespace tessera::dispatch
