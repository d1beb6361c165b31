#include "tessera/dtensor/dispatch/key.h"

#include "tessera/dtensor/core/tensor_lists.h"

namespace tessera::dispatch {

void Key::text(std::string_view value) {
  put(kString);
  put(value.size());
  uint64_t word = 0;
  for (std::size_t i = 0; i < value.size(); ++i) {
    word = (word << 8) | static_cast<unsigned char>(value[i]);
    if (i % 8 == 7) {
      put(word);
      word = 0;
    }
  }
  put(word);
}

void Key::plain(const at::Tensor& t) {
  put(kPlain | (static_cast<uint64_t>(t.scalar_type()) << 16) | (static_cast<uint64_t>(t.device().type()) << 8) |
      (t.unsafeGetTensorImpl()->is_wrapped_number() ? 1U : 0U));
}

namespace {

// Appends one non-tensor argument. Returns false if a key cannot hold it.
bool append_value(const at::IValue& v, bool number, Key& key) {
  if (v.isNone()) {
    key.none();
  } else if (number && v.isScalar()) {
    key.number(v.isInt(), v.isDouble(), v.isBool());
  } else if (v.isInt()) {
    key.integer(v.toInt());
  } else if (v.isBool()) {
    key.boolean(v.toBool());
  } else if (v.isDouble()) {
    key.real(v.toDouble());
  } else if (v.isIntList()) {
    key.integers(v.toIntList());
  } else if (v.isBoolList()) {
    key.booleans(v.toBoolList());
  } else if (v.isDoubleList()) {
    key.reals(v.toDoubleList());
  } else if (v.isString()) {
    key.text(v.toStringRef());
  } else if (v.isDevice()) {
    key.device(v.toDevice());
  } else if (v.isGenerator()) {
    key.generator();
  } else {
    return false;
  }
  return true;
}

void append_tensor(const TensorArg& entry, Key& key) {
  if (entry.spec == nullptr) {
    entry.tensor->defined() ? key.plain(*entry.tensor) : key.absent();
  } else if (detail::is_dtensor(*entry.tensor)) {
    key.dtensor(*entry.spec);
  } else {
    key.replicated(*entry.spec);
  }
}

}  // namespace

bool append_key(const Call& call, Key& key) {
  const bool by_numbers = call.traits.decides_by_numbers();
  std::size_t next = 0;  // in call.tensors, which are in schema order
  for (std::size_t i = 0; i < call.traits.num_args; ++i) {
    const std::size_t begin = next;
    while (next < call.tensors.size() && call.tensors[next].arg == i) ++next;
    if (begin < next) {
      key.tensors(next - begin);
      for (std::size_t t = begin; t < next; ++t) append_tensor(call.tensors[t], key);
    } else if (detail::is_tensor_list(call.arg(i))) {
      key.tensors(0);
    } else if (!append_value(call.arg(i), call.traits.number_arg[i] && !by_numbers, key)) {
      return false;
    }
  }
  return true;
}

}  // namespace tessera::dispatch
