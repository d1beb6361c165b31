#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>

#include "tessera/dtensor/core/memory_order.h"
#include "tessera/dtensor/core/wrapper.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dispatch/execute.h"
#include "tessera/dtensor/dispatch/gather.h"
#include "tessera/dtensor/dispatch/gather_schedule.h"
#include "tessera/dtensor/dispatch/unboxed_arguments.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/recorder.h"

// Defines kernels that take an operator's arguments without a stack of boxed values. They run a call if its decision is
// cached and says that only the operator runs (Decision::operator_alone: no redistribution, halo or copy, and no kernel
// that contiguous pieces need). Every other call goes to the operator's OpDispatcher.
namespace tessera::dispatch {

// ---- Before and after the operator

// Adds the gradient's hook to an argument (watch_gradient), and waits for its piece if that is not delivered yet. It is
// called for one argument after the other, as OpDispatcher does, so that all ranks wait in the same order.
inline void make_ready(const at::Tensor& t) {
  if (!t.defined()) return;
  if (t.unsafeGetTensorImpl()->autograd_meta() != nullptr) detail::watch_gradient(t);
  (void)detail::meta(t).local();
}
inline void make_ready(const std::optional<at::Tensor>& t) {
  if (t) make_ready(*t);
}
inline void make_ready(const at::ITensorListRef& list) {
  for (const at::Tensor& t : list) make_ready(t);
}
inline void make_ready(at::TensorList list) {
  for (const at::Tensor& t : list) make_ready(t);
}
template <class T>
void make_ready(const T& /*not a tensor*/) {}

// Returns the path of the first argument that a style gave a contract, or nullptr; for records.
inline const std::string* contract_path() { return nullptr; }
template <class First, class... Rest>
const std::string* contract_path(const First& first, const Rest&... rest) {
  if constexpr (std::is_same_v<First, at::Tensor>) {
    if (detail::is_dtensor(first) && detail::meta(first).contract) return &detail::meta(first).contract->path;
  } else if constexpr (std::is_same_v<First, std::optional<at::Tensor>>) {
    if (first) return contract_path(*first, rest...);
  }
  return contract_path(rest...);
}

// Says whether an argument has a tangent.
template <class T>
bool argument_has_tangent(const T& argument) {
  if constexpr (requires { detail::has_tangent(argument); }) return detail::has_tangent(argument);
  return false;
}

// `viewed` is nullptr if the result is not a view.
inline at::Tensor wrapped(at::Tensor&& local, const Decision& decision, std::size_t output, const OpTraits& traits,
                          const at::Tensor* viewed = nullptr) {
  const SpecPtr& spec = decision.outputs.at(output);
  if (!local.defined() || spec == nullptr) return {};
  if (!detail::is_piece_of(local, *spec)) detail::check_local(local, *spec, traits.name.c_str());
  if (viewed != nullptr) return detail::wrap_view(std::move(local), spec, *viewed, decision.offset(output));
  return detail::wrap(decision.make_dense ? as_dense(local, *spec) : std::move(local), spec);
}

inline const at::Tensor* viewed_by(const OpTraits& traits, const at::Tensor& first) {
  return traits.view ? &first : nullptr;
}
template <class T>
const at::Tensor* viewed_by(const OpTraits& /*traits*/, const T& /*not a tensor*/) {
  return nullptr;
}

// Gives a view, or a copy of the same logical tensor, the contract of its input.
inline void inherit_contract(const at::Tensor& from, const at::Tensor& to, const OpTraits& traits) {
  if (traits.view) c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
  if (!traits.keeps_contract) return;
  const ContractPtr& contract = detail::meta(from).contract;
  if (contract) detail::meta(to).contract = inherited(contract, traits.view);
}
template <class T>
void inherit_contract(const T& /*not a tensor*/, const at::Tensor& /*to*/, const OpTraits& /*traits*/) {}

// Throws an operator's exception on; one that this rank alone may see fails the World first.
[[noreturn]] void rethrow_on_pieces(bool ranks_differ, World& world, const std::string& name);

// Calls the operator on the pieces, below autograd.
template <class Call>
void on_pieces(bool ranks_differ, World& world, const std::string& name, const Call& call) {
  const BelowAutograd below;
  try {
    call();
  } catch (...) {
    rethrow_on_pieces(ranks_differ, world, name);
  }
}

// ---- The kernels

template <class Op, class Schema = typename Op::schema>
class Unboxed;

template <class Op, class R, class... Args>
class Unboxed<Op, R(Args...)> final : public c10::OperatorKernel {
 public:
  explicit Unboxed(const c10::OperatorHandle& op) : op_(op) {
    auto dispatcher = std::make_unique<OpDispatcher>(op);
    dispatcher_ = dispatcher.get();
    boxed_ = c10::KernelFunction::makeFromBoxedFunctor(std::move(dispatcher));
  }

  R operator()(c10::DispatchKeySet keys, Args... args) {
    const OpTraits& traits = dispatcher_->traits();
    Key key(false);
    if ((append_argument(args, traits, key) && ...)) {
      const DecisionPtr decision = dispatcher_->find_operator_alone(key);
      if (decision != nullptr && (decision->kernel == nullptr || (has_contiguous_piece(args) && ...))) {
        if (decision->kernel != nullptr) dispatcher_->count_hit();
        return run(*decision, args...);
      }
    }
    return boxed_.call<R, Args...>(op_, keys, std::forward<Args>(args)...);
  }

 private:
  R run(const Decision& decision, std::remove_reference_t<Args>&... args) {
    World& world = decision.first_spec->mesh.world();
    const Recorder::Span span(world.recorder(), RecordKind::kOperator, dispatcher_->traits().name,
                              [&] { return contract_path(args...); });
    (make_ready(args), ...);
    Locals<Args...> locals(args...);
    for (const auto& [arg, ints] : decision.local_args)
      replace_sizes(locals, arg, ints, std::index_sequence_for<Args...>());
    const auto call = [&]() -> R {
      return std::apply([](auto&... each) -> R { return Op::call(each.get()...); }, locals);
    };
    return after(decision, world, call, args...);
  }

  template <std::size_t... I>
  static void replace_sizes(Locals<Args...>& locals, std::size_t arg, const std::vector<int64_t>& ints,
                            std::index_sequence<I...>) {
    ((I == arg ? std::get<I>(locals).replace_sizes(ints) : void()), ...);
  }

  template <class Call, class First, class... Rest>
  R after(const Decision& decision, World& world, const Call& call, First& first, Rest&... rest) {
    const OpTraits& traits = dispatcher_->traits();
    if constexpr (std::is_same_v<R, at::Tensor&>) {  // in place
      if ((argument_has_tangent(rest) || ...)) detail::start_tangent(first);
      on_pieces(decision.ranks_differ, world, traits.name, [&] { call(); });
      detail::note_write(detail::meta(first));
      return first;
    } else {
      R local;
      on_pieces(decision.ranks_differ, world, traits.name, [&] { local = call(); });
      if constexpr (std::is_same_v<R, at::Tensor>) {
        at::Tensor out = wrapped(std::move(local), decision, 0, traits, viewed_by(traits, first));
        inherit_contract(first, out, traits);
        return out;
      } else if constexpr (std::is_same_v<R, std::vector<at::Tensor>>) {
        for (std::size_t k = 0; k < local.size(); ++k) {
          local[k] = wrapped(std::move(local[k]), decision, k, traits, viewed_by(traits, first));
          inherit_contract(first, local[k], traits);
        }
        return local;
      } else {
        std::size_t k = 0;
        std::apply([&](auto&... each) { ((each = wrapped(std::move(each), decision, k++, traits)), ...); }, local);
        return local;
      }
    }
  }

  const c10::OperatorHandle op_;
  OpDispatcher* dispatcher_ = nullptr;  // owned by boxed_
  c10::KernelFunction boxed_;
};

// Runs operators on lists that compute element by element, for calls in which tensors at the same index have the same
// Spec in every list. Such a call needs no decision, so none is cached.
template <class Op, class Schema = typename Op::schema>
class UnboxedList;

template <class Op, class R, class... Args>
class UnboxedList<Op, R(at::TensorList, Args...)> final : public c10::OperatorKernel {
 public:
  explicit UnboxedList(const c10::OperatorHandle& op)
      : op_(op),
        name_(op.schema().name()),
        boxed_(c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<OpDispatcher>(op))) {}

  R operator()(c10::DispatchKeySet keys, at::TensorList first, Args... args) {
    if (!first.empty() && fits(first, first) && (fits(args, first) && ...)) return run(first, args...);
    return boxed_.call<R, at::TensorList, Args...>(op_, keys, first, std::forward<Args>(args)...);
  }

 private:
  static bool fits(at::TensorList list, at::TensorList first) {
    if (list.size() != first.size()) return false;
    const Spec* before = nullptr;
    for (std::size_t k = 0; k < list.size(); ++k) {
      if (!detail::is_dtensor(list[k]) || !detail::is_dtensor(first[k])) return false;
      const detail::Meta& meta = detail::meta(list[k]);
      const Spec* const spec = meta.spec.get();
      if (meta.is_copied_view() || spec != detail::meta(first[k]).spec.get()) return false;
      if (spec == before) continue;
      if (spec->partial || !spec->mesh.is_member() || (before != nullptr && !(spec->mesh == before->mesh)))
        return false;
      before = spec;
    }
    return true;
  }
  template <class T>
  static bool fits(const T& /*not a list of tensors*/, at::TensorList /*first*/) {
    return !std::is_same_v<std::decay_t<T>, at::Tensor>;
  }

  R run(at::TensorList first, std::remove_reference_t<Args>&... args) {
    World& world = detail::meta(first[0]).spec->mesh.world();
    const Recorder::Span span(world.recorder(), RecordKind::kOperator, name_, [] { return nullptr; });
    make_ready(first);
    (make_ready(args), ...);
    Locals<at::TensorList, Args...> locals(first, args...);
    const auto call = [&]() -> R {
      try {
        const BelowAutograd below;
        return std::apply([](auto&... each) -> R { return Op::call(each.get()...); }, locals);
      } catch (...) {
        rethrow_of_list(op_, c10::impl::boxArgs<at::TensorList, Args...>(first, args...), world);
      }
    };
    if constexpr (std::is_void_v<R>) {
      if ((argument_has_tangent(args) || ...)) {
        for (const at::Tensor& t : first) detail::start_tangent(t);
      }
      call();
      // LibTorch's autograd does not count the writes of a list operator; it expects the operators that it calls to do
      // so.
      for (const at::Tensor& t : first) {
        detail::note_write(detail::meta(t));
        if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
      }
    } else {
      R out = call();
      for (std::size_t k = 0; k < out.size(); ++k) {
        const SpecPtr& spec = detail::meta(first[k]).spec;
        const bool alike = spec->dtype == out[k].scalar_type() && first[k].is_non_overlapping_and_dense();
        out[k] = alike ? detail::wrap(std::move(out[k]), spec) : wrap_like(out[k], first[k], *spec);
      }
      return out;
    }
  }

  const c10::OperatorHandle op_;
  const std::string name_;
  c10::KernelFunction boxed_;
};

// Makes a kernel of class `Kernel`, which is Unboxed or UnboxedList.
template <class Kernel>
c10::KernelFunction make_unboxed(const c10::OperatorHandle& op) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(std::make_unique<Kernel>(op));
}

// Returns the kernel of an operator that unboxed.cpp lists; nullopt for others.
std::optional<c10::KernelFunction> unboxed_kernel(const c10::OperatorHandle& op);

// Registers the kernel of an operator of ours, which is defined already; `Op` describes it as LibTorch's at::_ops do.
template <class Op>
[[nodiscard]] c10::RegistrationHandleRAII register_unboxed() {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const c10::OperatorHandle op = dispatcher.findSchemaOrThrow(Op::name, Op::overload_name);
  return dispatcher.registerImpl(op.operator_name(), detail::kDTensorKey, make_unboxed<Unboxed<Op>>(op), std::nullopt,
                                 nullptr, "tessera");
}

}  // namespace tessera::dispatch
