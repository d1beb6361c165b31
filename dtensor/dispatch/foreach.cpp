#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/dispatch/meta_run.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/core/in_memory.h"

namespace tessera::dispatch {
namespace {

// Lists the list operators that reduce each tensor. The others compute element by element, so pieces of the same layout
// give the result's pieces.
constexpr std::array kReducing = {"_foreach_norm", "_foreach_max", "_foreach_powsum"};

// Describes the tensors of one list argument, as a range in Call::tensors.
struct List {
  std::size_t arg = 0;
  std::size_t begin = 0;
  std::size_t size = 0;
};

std::vector<List> lists_of(const Call& call) {
  std::vector<List> out;
  for (std::size_t i = 0; i < call.tensors.size(); ++i) {
    if (out.empty() || out.back().arg != call.tensors[i].arg) out.push_back({.arg = call.tensors[i].arg, .begin = i});
    ++out.back().size;
  }
  return out;
}

// Says whether a tensor beside the lists, such as a factor or a count of steps, is a single number.
bool one_number(const TensorArg& entry) { return !entry.tensor->defined() || entry.tensor->numel() == 1; }

// Returns the placements to which each tensor must be redistributed so that the operator on the pieces gives the pieces
// of the results; nullopt for a tensor that stays. The first list's layouts count, with Partial as Replicate; numbers
// are replicated. Returns nullopt where shapes differ.
using Moves = std::vector<std::optional<Placements>>;

// Holds a tensor of a list that is to be moved.
struct Moved {
  std::size_t place;  // in its list
  const TensorArg& entry;
  const Placements& to;
};

// Says whether two DTensors are views of one and may have an element in common: whether the ranges of memory that they
// have in one process meet.
bool may_overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto by_operators = [](const at::Tensor& t) {
    return detail::WriteCounters{.version = {}, .by_operators = detail::meta(t).write_counters().by_operators};
  };
  const auto end = [](const at::Tensor& t) {
    return static_cast<int64_t>(
        at::detail::computeStorageNbytes(t.sizes(), t.strides(), /*itemsize=*/1, t.storage_offset()));
  };
  if (a.numel() == 0 || b.numel() == 0 || !detail::share_counter(by_operators(a), by_operators(b))) return false;
  return a.itemsize() != b.itemsize() || (a.storage_offset() < end(b) && b.storage_offset() < end(a));
}

// Throws where a tensor is written in a copy of another layout, and the call uses a view of the same elements too,
// which would be read or written without what is written into the copy. Of one tensor that stands twice there is one
// copy.
void refuse_lost_writes(const Call& call, const Moves& moves) {
  for (std::size_t i = 0; i < moves.size(); ++i) {
    if (!moves[i] || !call.writes(call.tensors[i])) continue;
    const at::Tensor& written = *call.tensors[i].tensor;
    for (std::size_t j = 0; j < moves.size(); ++j) {
      const at::Tensor& other = *call.tensors[j].tensor;
      if (!detail::is_dtensor(other) || (written.is_same(other) && moves[i] == moves[j])) continue;
      if (!may_overlap(written, other)) continue;
      throw std::invalid_argument(fmt::format(
          "{}: would write {} in a copy laid out as {}, and uses a view of the same tensor, {}, which would not have "
          "what is written; use them in two calls, or redistribute the tensor first",
          call.traits.name, to_string(*call.tensors[i].spec), to_string(*moves[i]), to_string(*call.tensors[j].spec)));
    }
  }
}

// LibTorch goes through the lists in order, so that a tensor may be written at one place and read at a later one.
// Throws where it would be read in another layout there: the copy for that would be made before the write.
void check_order(const Call& call, const std::vector<List>& lists, const Moves& moves, const Moved& moved) {
  if (call.writes(moved.entry)) return;
  for (std::size_t j = 0; j < moved.place; ++j) {
    const TensorArg& before = call.tensors[lists[0].begin + j];
    if (!call.writes(before) || !may_overlap(*before.tensor, *moved.entry.tensor)) continue;
    if (before.tensor->is_same(*moved.entry.tensor) && moves[lists[0].begin + j] == moved.to) continue;
    throw std::invalid_argument(fmt::format(
        "{}: tensor {} of the written list, {}, is read again beside tensor {}, as {}; redistribute both to one layout "
        "first",
        call.traits.name, j, to_string(*moved.entry.spec), moved.place, to_string(moved.to)));
  }
}

std::optional<Moves> moves_of(const Call& call, const std::vector<List>& lists) {
  if (!call.arg(lists[0].arg).isTensorList()) return std::nullopt;
  Moves out(call.tensors.size());
  for (const List& list : lists) {
    const bool is_list = call.arg(list.arg).isTensorList();
    if (is_list && list.size != lists[0].size) return std::nullopt;
    for (std::size_t k = 0; k < list.size; ++k) {
      const TensorArg& entry = call.tensors[list.begin + k];
      const TensorArg& first = call.tensors[lists[0].begin + k];
      if (&list == lists.data() && entry.spec == nullptr) return std::nullopt;  // a plain number gives no layout
      const bool follows = is_list && entry.tensor->sizes() == first.tensor->sizes() && first.spec != nullptr;
      if (!follows && !one_number(entry) && (is_list || entry.tensor->dim() > 1)) return std::nullopt;
      if (!follows && is_list && entry.tensor->defined() && entry.tensor->dim() > first.tensor->dim())
        return std::nullopt;
      if (call.writes(entry) && !detail::is_dtensor(*entry.tensor)) return std::nullopt;
      if (entry.spec == nullptr) {
        if (follows && first.spec->sharded) return std::nullopt;
        continue;
      }
      if (follows && entry.spec == first.spec && !entry.spec->partial) continue;
      Placements wanted =
          follows ? without_partial(first.spec->placements) : Placements(entry.spec->placements.size(), Replicate());
      if (wanted == entry.spec->placements) continue;
      check_order(call, lists, out, {k, entry, wanted});
      out[list.begin + k] = std::move(wanted);
    }
  }
  refuse_lost_writes(call, out);
  return out;
}

at::Tensor local_of(const at::Tensor& t) { return detail::is_dtensor(t) ? detail::meta(t).local() : with_memory(t); }

void check_implicit(const Call& call, const Moves& moves) {
  std::string text;
  for (std::size_t i = 0; (Strict::enabled() || WarnImplicit::enabled()) && i < moves.size(); ++i) {
    if (!moves[i]) continue;
    const Spec& from = *call.tensors[i].spec;
    const auto add = [&](const Spec& there, const Placements& to) {
      const RoutePtr route = route_between(there, to);
      if (!route->communicates()) return;
      text += fmt::format("; {} would go to {} by {}", to_string(there), to_string(to), route->plan().to_string());
    };
    add(from, *moves[i]);
    if (call.writes(call.tensors[i])) add(*with_placements(from, *moves[i]), from.placements);
  }
  if (!text.empty()) detail::implicit_communication(call.traits.name, [&] { return text; });
}

// Returns the arguments with tensors replaced by their pieces.
torch::jit::Stack local_stack(const Call& call, const std::vector<List>& lists, const Moves& moves) {
  std::optional<World::Scope> scope;
  const auto moved = [](const std::optional<Placements>& move) { return move.has_value(); };
  if (std::any_of(moves.begin(), moves.end(), moved))
    scope.emplace(call.first_spec->mesh.world(), call.traits.name.c_str());
  // Holds the moved pieces of written tensors, since one that the lists name twice has one piece.
  struct Written {
    const void* tensor;
    const Placements* to;
    at::Tensor piece;
  };
  std::vector<Written> written;
  const auto piece = [&](std::size_t i) {
    at::Tensor local = local_of(*call.tensors[i].tensor);
    if (!moves[i]) return local;
    const void* const tensor = call.tensors[i].tensor->unsafeGetTensorImpl();
    const auto known =
        std::ranges::find_if(written, [&](const Written& w) { return w.tensor == tensor && *w.to == *moves[i]; });
    if (known != written.end()) return known->piece;
    const SpecPtr to = with_placements(*call.tensors[i].spec, *moves[i]);
    at::Tensor moved = in_memory_order(redistribute_local(local, *call.tensors[i].spec, *moves[i]), *to);
    if (!call.writes(call.tensors[i])) return moved;
    written.push_back({tensor, &*moves[i], moved.is_alias_of(local) ? moved.clone() : moved});
    return written.back().piece;
  };
  torch::jit::Stack out(call.args().begin(), call.args().end());
  for (const List& list : lists) {
    if (!call.arg(list.arg).isTensorList()) {
      if (call.tensors[list.begin].tensor->defined()) out[list.arg] = piece(list.begin);
      continue;
    }
    c10::List<at::Tensor> pieces;
    pieces.reserve(list.size);
    for (std::size_t k = 0; k < list.size; ++k) pieces.push_back(piece(list.begin + k));
    out[list.arg] = std::move(pieces);
  }
  return out;
}

// Is a piece and the copy of it that an operator gets.
struct Refit {
  at::Tensor piece;
  at::Tensor copy;
};

// LibTorch's fused optimizers walk through the memory of all lists at once, in the order of the parameter's memory, and
// do not look at strides on the CPU. Replaces pieces in another order, or with gaps, by copies, and returns these.
std::vector<Refit> fit_fused(const Call& call, const std::vector<List>& lists, torch::jit::Stack& pieces) {
  std::vector<Refit> out;
  if (!call.traits.rule_name.starts_with("_fused_")) return out;
  const std::vector<at::Tensor> parameters = pieces[lists[0].arg].toTensorVector();
  for (const List& list : lists) {
    if (!pieces[list.arg].isTensorList()) continue;
    c10::List<at::Tensor> fitting = pieces[list.arg].toTensorList();
    for (std::size_t k = 0; k < fitting.size(); ++k) {
      const at::Tensor piece = fitting[k], &parameter = parameters[k];
      // Counts of steps are among the lists.
      if (!piece.defined() || piece.sizes() != parameter.sizes() || piece.numel() <= 1) continue;
      const bool dense = parameter.is_non_overlapping_and_dense();
      if (dense && same_memory_order(piece, parameter)) continue;
      const at::Tensor order = dense ? parameter : at::empty(parameter.sizes(), at::TensorOptions(at::kMeta));
      out.push_back({piece, at::empty_strided(order.sizes(), order.strides(), piece.options()).copy_(piece)});
      fitting[k] = out.back().copy;
    }
    pieces[list.arg] = std::move(fitting);
  }
  return out;
}

// Redistributes what was written in copies to the written tensors' layouts, and copies it there.
void write_back(const Call& call, const std::vector<List>& lists, const Moves& moves, const torch::jit::Stack& local) {
  const at::AutoDispatchBelowADInplaceOrView below;
  for (const List& list : lists) {
    for (std::size_t k = 0; k < list.size; ++k) {
      const TensorArg& entry = call.tensors[list.begin + k];
      const std::optional<Placements>& move = moves[list.begin + k];
      if (!move || !call.writes(entry)) continue;
      const at::Tensor written =
          local[list.arg].isTensorList() ? local[list.arg].toTensorVector()[k] : local[list.arg].toTensor();
      detail::meta(*entry.tensor)
          .local()
          .copy_(redistribute_local(written, *with_placements(*entry.spec, *move), entry.spec->placements));
    }
  }
}

// Wraps a result that belongs to `entry` of a later list, such as a count of steps: it is laid out as the first list's
// tensor where it has its sizes, else it is whole.
at::Tensor wrap_of(const at::Tensor& local, const TensorArg& entry, const TensorArg& first) {
  if (entry.tensor->sizes() == first.tensor->sizes()) return wrap_like(local, *first.tensor, *first.spec);
  const Spec& spec = *first.spec;
  const Placements whole(spec.placements.size(), Replicate());
  return detail::wrap(local,
                      intern_spec(spec.mesh, whole, local.sizes().vec(), local.strides().vec(), local.scalar_type()));
}

// Says whether the operator can be tried on tensors without data. It cannot where it reads a factor that is a tensor,
// nor has a fused optimizer a kernel for them.
bool runs_on_meta(const c10::OperatorHandle& op, const torch::jit::Stack& args) {
  const auto is_tensor = [](const at::IValue& value) { return value.isTensor(); };
  return !op.schema().name().starts_with("aten::_fused_") && std::none_of(args.begin(), args.end(), is_tensor);
}

// Throws what the operator throws on the global shapes and dtypes, if it does. The tensors are row-major, since two
// elements of a whole may share an address where those of a piece do not.
void throw_alike(const c10::OperatorHandle& op, torch::jit::Stack args) {
  for (at::IValue& value : args) {
    detail::replace_tensors(value, [](const at::Tensor& t, std::size_t) {
      return t.defined() ? at::empty(t.sizes(), t.options().device(c10::kMeta)) : t;
    });
  }
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(args);
  } catch (const c10::NotImplementedError&) {  // there is no such kernel
  }
}

// Returns the Spec of a result of the first list's tensor `first`, whose Spec is `spec`.
SpecPtr spec_like(const at::Tensor& first, const Spec& spec, at::ScalarType dtype) {
  const bool dense = first.is_non_overlapping_and_dense();
  if (dense && detail::is_dtensor(first) && !spec.partial && spec.dtype == dtype) return detail::meta(first).spec;
  const std::vector<int64_t> strides = dense ? spec.strides : at::infer_dense_strides(spec.sizes, spec.strides);
  return intern_spec(spec.mesh, without_partial(spec.placements), spec.sizes, strides, dtype);
}

void note_writes(const Call& call) {
  for (const TensorArg& entry : call.tensors) {
    if (call.writes(entry) && detail::is_dtensor(*entry.tensor)) detail::note_write(detail::meta(*entry.tensor));
  }
}

// Returns the list of results whose arguments are `list`.
const List& list_of_result(const std::vector<List>& lists, std::size_t result) {
  return lists[std::min(result, lists.size() - 1)];  // results in several lists are those of the arguments
}

void return_lists(const Call& call, torch::jit::Stack lists) {
  call.stack.resize(call.base);
  for (at::IValue& value : lists) call.stack.push_back(std::move(value));
}

// Runs the call on a rank outside the mesh, whose results have the layouts that they have on the mesh's ranks. Returns
// false if the results' dtypes are not known. Throws what the operator throws on the global shapes and dtypes.
bool run_outside(const Call& call, const std::vector<List>& lists) {
  const std::size_t results = call.op.schema().returns().size();
  std::optional<std::vector<MetaResult>> of_meta;
  if (results > 0) {
    of_meta = run_on_meta(call);
    if (!of_meta) return false;
  } else {
    torch::jit::Stack args(call.args().begin(), call.args().end());
    if (runs_on_meta(call.op, args)) throw_alike(call.op, std::move(args));
  }
  const at::Device device = call.first_spec->mesh.device();
  torch::jit::Stack out;
  std::size_t next = 0;
  for (std::size_t r = 0; r < results; ++r) {
    c10::List<at::Tensor> wrapped;
    const List& list = list_of_result(lists, r);
    for (std::size_t k = 0; k < list.size; ++k) {
      const TensorArg& entry = call.tensors[list.begin + k];
      const TensorArg& first = call.tensors[lists[0].begin + k];
      const MetaResult& result = of_meta->at(next++);
      const Placements whole(first.spec->placements.size(), Replicate());
      const bool alike = entry.tensor->sizes() == first.tensor->sizes();
      const SpecPtr spec =
          alike ? spec_like(*first.tensor, *first.spec, result.info.dtype)
                : intern_spec(first.spec->mesh, whole, result.info.sizes, result.strides, result.info.dtype);
      wrapped.push_back(
          detail::wrap(at::empty(spec->local_sizes, at::TensorOptions(spec->dtype).device(device)), spec));
    }
    out.emplace_back(std::move(wrapped));
  }
  note_writes(call);
  return_lists(call, std::move(out));
  return true;
}

}  // namespace

at::Tensor wrap_like(const at::Tensor& local, const at::Tensor& first, const Spec& spec) {
  const SpecPtr of_result = spec_like(first, spec, local.scalar_type());
  return detail::wrap(first.is_non_overlapping_and_dense() ? local : as_dense(local, *of_result), of_result);
}

void rethrow_of_list(const c10::OperatorHandle& op, torch::jit::Stack args, World& world) {
  const std::exception_ptr error = std::current_exception();
  if (runs_on_meta(op, args)) throw_alike(op, std::move(args));
  world.guard(op.schema().name(), [&] { std::rethrow_exception(error); });
  std::rethrow_exception(error);  // which guard has done
}

bool run_foreach(const Call& call) {
  if (std::find(kReducing.begin(), kReducing.end(), call.traits.rule_name) != kReducing.end()) return false;
  const std::vector<List> lists = lists_of(call);
  const std::optional<Moves> moves = moves_of(call, lists);
  if (!moves) return false;
  check_implicit(call, *moves);
  if (!call.first_spec->mesh.is_member()) return run_outside(call, lists);
  torch::jit::Stack local = local_stack(call, lists, *moves);
  torch::jit::Stack given;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    const std::vector<Refit> refits = fit_fused(call, lists, local);
    given = local;
    call.op.callBoxed(local);
    for (const Refit& each : refits) each.piece.copy_(each.copy);
  } catch (...) {
    rethrow_of_list(call.op, torch::jit::Stack(call.args().begin(), call.args().end()), call.first_spec->mesh.world());
  }
  write_back(call, lists, *moves, given);
  note_writes(call);
  for (std::size_t r = 0; r < local.size(); ++r) {
    c10::List<at::Tensor> wrapped;
    const List& list = list_of_result(lists, r);
    std::size_t k = 0;
    for (const at::Tensor& t : local[r].toTensorVector()) {
      wrapped.push_back(wrap_of(t, call.tensors[list.begin + k], call.tensors[lists[0].begin + k]));
      ++k;
    }
    local[r] = std::move(wrapped);
  }
  return_lists(call, std::move(local));
  return true;
}

}  // namespace tessera::dispatch
