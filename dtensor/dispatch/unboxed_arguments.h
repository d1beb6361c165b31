#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/wrapper.h"
#include "tessera/dtensor/dispatch/call.h"
#include "tessera/dtensor/dispatch/gather.h"
#include "tessera/dtensor/dispatch/key.h"

// This file reads an operator's arguments by their C++ types: it appends them to a key, and gives this rank's piece of
// each.
namespace tessera::dispatch {

// ---- Appending arguments to a key

// These functions append what append_key appends. They return false where OpDispatcher must run the call. With
// `written` the operator writes `t` in place: a parameter that operators which read it gather (gather.h) is written in
// pieces.
inline bool append_dtensor(const at::Tensor& t, const OpTraits& traits, Key& key, bool written = false) {
  if (!detail::is_dtensor(t)) return false;
  const detail::Meta& meta = detail::meta(t);
  if (meta.is_copied_view() || (meta.spec->partial && traits.scales)) return false;
  if (!written && !traits.keeps_contract && is_gathered(meta)) return false;
  key.dtensor(*meta.spec);
  return true;
}
inline bool append_argument(const at::Tensor& t, const OpTraits& traits, Key& key) {
  key.tensors(1);
  if (t.defined()) return append_dtensor(t, traits, key);
  key.absent();
  return true;
}
inline bool append_argument(at::Tensor& written, const OpTraits& traits, Key& key) {
  key.tensors(1);
  return append_dtensor(written, traits, key, /*written=*/true);
}
inline bool append_argument(const at::Scalar& value, const OpTraits& traits, Key& key) {
  if (!traits.decides_by_numbers()) {
    key.number(value.isIntegral(false), value.isFloatingPoint(), value.isBoolean());
  } else if (value.isSymbolic() || value.isComplex()) {
    return false;
  } else if (value.isBoolean()) {
    key.boolean(value.toBool());
  } else if (value.isFloatingPoint()) {
    key.real(value.toDouble());
  } else {
    key.integer(value.toLong());
  }
  return true;
}
inline bool append_argument(int64_t value, const OpTraits&, Key& key) {
  key.integer(value);
  return true;
}
inline bool append_argument(const c10::SymInt& value, const OpTraits&, Key& key) {
  const std::optional<int64_t> known = value.maybe_as_int();
  if (known) key.integer(*known);
  return known.has_value();
}
template <class Enum>  // a dtype or a memory format, which are integers when boxed
requires std::is_enum_v<Enum>
bool append_argument(Enum value, const OpTraits&, Key& key) {
  key.integer(static_cast<int64_t>(value));
  return true;
}
inline bool append_argument(c10::Device value, const OpTraits&, Key& key) {
  key.device(value);
  return true;
}
inline bool append_argument(bool value, const OpTraits&, Key& key) {
  key.boolean(value);
  return true;
}
inline bool append_argument(double value, const OpTraits&, Key& key) {
  key.real(value);
  return true;
}
inline bool append_argument(std::string_view value, const OpTraits&, Key& key) {
  key.text(value);
  return true;
}
inline bool append_argument(at::IntArrayRef value, const OpTraits&, Key& key) {
  key.integers(value);
  return true;
}
inline bool append_argument(const at::OptionalIntArrayRef& value, const OpTraits& traits, Key& key) {
  if (value) return append_argument(*value, traits, key);
  key.none();
  return true;
}
inline bool append_argument(c10::SymIntArrayRef value, const OpTraits& traits, Key& key) {
  const auto known = c10::asIntArrayRefSlowOpt(value);
  return known && append_argument(*known, traits, key);
}
template <std::size_t N>
bool append_argument(const std::array<bool, N>& value, const OpTraits&, Key& key) {
  key.booleans(value);
  return true;
}
inline bool append_argument(const at::ITensorListRef& list, const OpTraits& traits, Key& key) {
  key.tensors(list.size());
  for (const at::Tensor& t : list) {
    if (!append_dtensor(t, traits, key)) return false;
  }
  return true;
}

template <class T>
bool append_argument(const std::optional<T>& value, const OpTraits& traits, Key& key) {
  if (value) return append_argument(*value, traits, key);
  if constexpr (std::is_same_v<T, at::Tensor>) {
    key.tensors(1);
    key.absent();
  } else {
    key.none();
  }
  return true;
}

// ---- An argument's local value

template <class Arg>
struct Local {
  explicit Local(Arg& given) : value(given) {}
  Arg& get() { return value; }
  // Replaces the caller's sizes or strides by those of this rank's piece.
  void replace_sizes(const std::vector<int64_t>& /*ints*/) {
    throw std::logic_error("an argument that takes no sizes of a piece");
  }
  Arg& value;
};
template <>
inline void Local<at::IntArrayRef>::replace_sizes(const std::vector<int64_t>& ints) {
  value = ints;
}
template <>
inline void Local<c10::SymIntArrayRef>::replace_sizes(const std::vector<int64_t>& ints) {
  value = c10::fromIntArrayRefSlow(ints);
}
template <>
struct Local<const at::Tensor> {
  explicit Local(const at::Tensor& t) : value(t.defined() ? detail::meta(t).local() : t) {}
  const at::Tensor& get() { return value; }
  void replace_sizes(const std::vector<int64_t>&) {}
  const at::Tensor& value;
};
template <>
struct Local<at::Tensor> {
  explicit Local(const at::Tensor& t) : value(detail::meta(t).local()) {}
  at::Tensor& get() { return value; }
  void replace_sizes(const std::vector<int64_t>&) {}
  at::Tensor value;
};
template <>
struct Local<const std::optional<at::Tensor>> {
  explicit Local(const std::optional<at::Tensor>& t) {
    if (t) value = t->defined() ? detail::meta(*t).local() : *t;
  }
  const std::optional<at::Tensor>& get() { return value; }
  void replace_sizes(const std::vector<int64_t>&) {}
  std::optional<at::Tensor> value;
};
template <class List>
struct LocalList {
  explicit LocalList(const List& list) {
    pieces.reserve(list.size());
    for (const at::Tensor& t : list) pieces.push_back(detail::meta(t).local());
    value = List(pieces);
  }
  const List& get() { return value; }
  void replace_sizes(const std::vector<int64_t>&) {}
  std::vector<at::Tensor> pieces;
  List value;
};
template <>
struct Local<const at::ITensorListRef> : LocalList<at::ITensorListRef> {
  using LocalList::LocalList;
};
template <>
struct Local<at::TensorList> : LocalList<at::TensorList> {
  using LocalList::LocalList;
};

template <class... Args>
using Locals = std::tuple<Local<std::remove_reference_t<Args>>...>;

// Says whether this rank's piece of an argument is contiguous, where it is a tensor or tensors. It waits for a piece
// that is not delivered yet, as make_ready does.
inline bool has_contiguous_piece(const at::Tensor& t) {
  return !t.defined() || detail::meta(t).local().is_contiguous();
}
inline bool has_contiguous_piece(const std::optional<at::Tensor>& t) { return !t || has_contiguous_piece(*t); }
template <class List>
requires std::is_same_v<List, at::ITensorListRef> || std::is_same_v<List, at::TensorList>
bool has_contiguous_piece(const List& list) {
  return std::all_of(list.begin(), list.end(), [](const at::Tensor& t) { return has_contiguous_piece(t); });
}
template <class T>
bool has_contiguous_piece(const T& /*not a tensor*/) {
  return true;
}

}  // namespace tessera::dispatch
