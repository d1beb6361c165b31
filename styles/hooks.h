#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/mesh/recorder.h"
#include "tessera/styles/hookable.h"

// TESSERA_MODULE(Block); in the place of TORCH_MODULE(Block); declares a module whose forward runs hooks. LibTorch's
// own modules have no hooks and their forward is not virtual, so only such a module lets a style change the inputs and
// outputs of a container.
//
// Block is then a holder of Hooked<BlockImpl>, whose forward has BlockImpl's signature: m(x), m->forward(x) and
// torch::nn::Sequential all run the hooks. BlockImpl::forward must be one function: not a template, not overloaded.
// Default arguments work in m(x), and in Sequential with FORWARD_HAS_DEFAULT_ARGS; m->forward(x, y) needs all
// arguments. BlockImpl::forward gets copies of the arguments that hold tensors, so that no hook changes the caller's;
// only a tuple that forward takes by a reference which is not const stays the caller's in m->forward(x).
//
// Called through BlockImpl itself, a pointer or a reference, forward runs no hooks: write layers->at<Block::Impl>(i)
// and m->as<Block>(), not at<BlockImpl>(i). A callable of parallelize_module that was given such a pointer or reference
// to a module with hooks throws std::invalid_argument.
namespace tessera {
namespace detail {

// ---- The tensors among values: at::Tensor, std::optional<at::Tensor>, vectors of tensors, and pairs and tuples of
// these.

// Says whether a value of this type may hold such tensors.
template <class T>
inline constexpr bool kIsReplaceable = std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>> ||
                                       std::is_same_v<T, std::vector<at::Tensor>>;
template <class... T>
inline constexpr bool kIsReplaceable<std::tuple<T...>> = (kIsReplaceable<std::remove_cvref_t<T>> || ...);
template <class A, class B>
inline constexpr bool kIsReplaceable<std::pair<A, B>> = kIsReplaceable<std::tuple<A, B>>;

template <class T>
inline constexpr bool kIsTuple = false;
template <class... T>
inline constexpr bool kIsTuple<std::tuple<T...>> = true;
template <class A, class B>
inline constexpr bool kIsTuple<std::pair<A, B>> = true;

// Say whether hooks may replace a member of a tuple, a value or a tuple that forward takes by a reference, and whether
// they may replace all its tensors.
template <class T>
inline constexpr bool kMayReplace = std::is_same_v<T, std::remove_cvref_t<T>> ||
                                    (kIsTuple<std::remove_reference_t<T>> && std::is_lvalue_reference_v<T>);

template <class T>
inline constexpr bool kTakesBack = true;
template <class... T>
inline constexpr bool kTakesBack<std::tuple<T...>> = ((!kIsReplaceable<std::remove_cvref_t<T>> || kMayReplace<T>)&&...);
template <class A, class B>
inline constexpr bool kTakesBack<std::pair<A, B>> = kTakesBack<std::tuple<A, B>>;

inline void collect(const at::Tensor& t, std::vector<at::Tensor>& out) { out.push_back(t); }
inline void collect(const std::optional<at::Tensor>& t, std::vector<at::Tensor>& out) {
  out.push_back(t.value_or(at::Tensor()));
}
inline void collect(const std::vector<at::Tensor>& ts, std::vector<at::Tensor>& out) {
  out.insert(out.end(), ts.begin(), ts.end());
}
template <class T>
void collect(const T& values, std::vector<at::Tensor>& out) {
  if constexpr (kIsTuple<T>) std::apply([&](const auto&... value) { (collect(value, out), ...); }, values);
}

using TensorIterator = std::vector<at::Tensor>::const_iterator;
inline void put_back(at::Tensor& t, TensorIterator& from) { t = *from++; }
inline void put_back(std::optional<at::Tensor>& t, TensorIterator& from) {
  const at::Tensor& value = *from++;
  t = value.defined() ? std::optional<at::Tensor>(value) : std::nullopt;
}
inline void put_back(std::vector<at::Tensor>& ts, TensorIterator& from) {
  for (at::Tensor& t : ts) t = *from++;
}
template <class T>
void put_back(T& values, TensorIterator& from) {
  if constexpr (kIsTuple<T>) {
    static_assert(kTakesBack<T>,
                  "a tuple or pair among the arguments or results of a hooked forward holds its tensors by value, and "
                  "not const");
    std::apply([&](auto&... value) { (put_back(value, from), ...); }, values);
  }
}

// Puts the tensors that were collected from `values`, or others in their places, back into them.
template <class Values>
void put_all_back(Values& values, const std::vector<at::Tensor>& tensors) {
  TensorIterator next = tensors.begin();
  put_back(values, next);
  if (next != tensors.end()) {
    throw std::logic_error(
        "a hooked forward: a value that tensors were collected from did not take them back; this is an error of "
        "tessera/styles/hooks.h");
  }
}

// Is the type that holds an argument while hooks run: a copy where hooks may replace the value, else the caller's
// reference.
template <class Arg>
using Kept =
    std::conditional_t<std::is_lvalue_reference_v<Arg> && !kIsReplaceable<std::decay_t<Arg>>, Arg, std::decay_t<Arg>>;

// Does the same for a parameter of forward. A reference to a tuple that forward may write, such as a recurrent state,
// stays the caller's.
template <class Parameter>
using KeptFor =
    std::conditional_t<std::is_lvalue_reference_v<Parameter> && kIsTuple<std::remove_reference_t<Parameter>>, Parameter,
                       Kept<Parameter>>;

template <class Impl, class Forward = decltype(&Impl::forward)>
class HookedForward;

template <class Impl>
class HookedBase : public Impl, public Hookable {
 public:
  using Impl::Impl;
  HookedBase(const Impl& impl, const Hookable& hooks) : Impl(impl), Hookable(hooks) {}

 protected:
  // Runs the pre-hooks, Impl::forward (through `call`) and the hooks. CommCounter names this module's path for
  // collectives in them, and the recorder has them as this module's.
  template <class R, class Values, class Call>
  R run(Values& values, const Call& call) const {
    std::optional<World::Scope> scope;
    std::optional<Recorder::Span> span;
    if (hook_world() != nullptr) {
      scope.emplace(*hook_world(), nullptr, &hook_path());
      span.emplace(hook_world()->recorder(), RecordKind::kModule, recorded_name(), [] { return nullptr; });
    }
    if (hooks() == 0) return call(values);
    std::vector<at::Tensor> inputs;
    collect(values, inputs);
    run_pre_hooks(inputs);
    put_all_back(values, inputs);
    return after<R>(inputs, values, call);
  }

 private:
  template <class R, class Values, class Call>
  R after(const std::vector<at::Tensor>& inputs, Values& values, const Call& call) const {
    std::vector<at::Tensor> outputs;
    if constexpr (std::is_void_v<R>) {
      call(values);
      run_hooks(inputs, outputs);
    } else {
      std::decay_t<R> result = call(values);
      collect(result, outputs);
      run_hooks(inputs, outputs);
      put_all_back(result, outputs);
      return result;
    }
  }
};

template <class Impl, class Class, class R, class... Args>
class HookedForward<Impl, R (Class::*)(Args...)> : public HookedBase<Impl> {
 public:
  using HookedBase<Impl>::HookedBase;
  static_assert(!std::is_reference_v<R>, "a hooked forward returns its result by value");

  R forward(Args... args) {
    std::tuple<KeptFor<Args>...> values(std::forward<Args>(args)...);
    return this->template run<R>(values, [this](auto& kept) -> R {
      return std::apply([this](KeptFor<Args>&... value) -> R { return Impl::forward(static_cast<Args&&>(value)...); },
                        kept);
    });
  }

  // Calls forward without its last arguments, which have defaults; the holder's operator() uses it.
  template <class... Fewer>
  auto forward_with_defaults(Fewer&&... fewer) {
    using Result = decltype(this->Impl::forward(std::declval<Fewer>()...));
    std::tuple<Kept<Fewer>...> values(std::forward<Fewer>(fewer)...);
    return this->template run<Result>(values, [this](auto& kept) -> Result {
      return std::apply([this](auto&... value) -> Result { return Impl::forward(value...); }, kept);
    });
  }
};

template <class Impl, class Class, class R, class... Args>
class HookedForward<Impl, R (Class::*)(Args...) const> : public HookedForward<Impl, R (Class::*)(Args...)> {
 public:
  using HookedForward<Impl, R (Class::*)(Args...)>::HookedForward;
};

template <class Class, class R, class... Args>
constexpr std::size_t arity(R (Class::*)(Args...)) {
  return sizeof...(Args);
}

}  // namespace detail

template <class Impl>
class Hooked : public detail::HookedForward<Impl> {
 public:
  using detail::HookedForward<Impl>::HookedForward;

  // Keeps the hooks of this module; clone_module (clone.h) also keeps those of the modules below it.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    auto copy = std::dynamic_pointer_cast<Impl>(Impl::clone(device));
    if constexpr (std::is_copy_constructible_v<Impl>) {
      return std::make_shared<Hooked<Impl>>(*copy, static_cast<const Hookable&>(*this));
    } else {
      return copy;
    }
  }

  // Prints what Impl prints. A class without a pretty_print of its own is printed as Impl, not as Hooked<Impl>.
  void pretty_print(std::ostream& stream) const override {
    using OfModule = void (torch::nn::Module::*)(std::ostream&) const;
    const bool unnamed = this->name() == c10::demangle(typeid(*this).name());
    if (std::is_same_v<decltype(&Impl::pretty_print), OfModule> && unnamed) {
      stream << c10::demangle(typeid(Impl).name());
    } else {
      Impl::pretty_print(stream);
    }
  }
};

template <class Impl>
class HookedHolder : public torch::nn::ModuleHolder<Hooked<Impl>> {
 public:
  using torch::nn::ModuleHolder<Hooked<Impl>>::ModuleHolder;

  template <class... Args>
  auto operator()(Args&&... args) {
    if constexpr (sizeof...(Args) < detail::arity(&Hooked<Impl>::forward)) {
      return this->get()->forward_with_defaults(std::forward<Args>(args)...);
    } else {
      return this->get()->forward(std::forward<Args>(args)...);
    }
  }
};

}  // namespace tessera

// TESSERA_MODULE(Block) declares the class Block, a holder of tessera::Hooked<BlockImpl>.
#define TESSERA_MODULE(Name)                               \
  class Name : public tessera::HookedHolder<Name##Impl> {  \
   public:                                                 \
    using tessera::HookedHolder<Name##Impl>::HookedHolder; \
    using Impl = tessera::Hooked<Name##Impl>;              \
  }
