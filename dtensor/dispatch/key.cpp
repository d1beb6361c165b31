#include <bit>

#include <c10/core/DefaultDtype.h>

#include "tessera/dtensor/dispatch/decision.h"

namespace tessera::dispatch {
namespace {

using Key = c10::SmallVectorImpl<uint64_t>;

enum Tag : uint64_t {
  kNone = 1,
  kInt,
  kDouble,
  kBool,
  kInts,
  kDoubles,
  kBools,
  kString,
  kDevice,
  kGenerator,
  kNumber,
  kComplex
};

void append_string(const std::string& text, Key& key) {
  key.push_back(kString);
  key.push_back(text.size());
  uint64_t word = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    word = (word << 8) | static_cast<unsigned char>(text[i]);
    if (i % 8 == 7) {
      key.push_back(word);
      word = 0;
    }
  }
  key.push_back(word);
}

// One non-tensor argument. False: it has no place in a key.
bool append_value(const at::IValue& v, bool number, Key& key) {
  if (v.isNone()) {
    key.push_back(kNone);
  } else if (number && v.isScalar()) {
    // Its type takes part in type promotion; its value decides nothing (OpTraits::number_arg).
    key.push_back(kNumber + 16 * (v.isInt() ? 1U : v.isDouble() ? 2U : v.isBool() ? 3U : 4U));
  } else if (v.isInt()) {
    key.push_back(kInt);
    key.push_back(static_cast<uint64_t>(v.toInt()));
  } else if (v.isBool()) {
    key.push_back(kBool);
    key.push_back(v.toBool() ? 1 : 0);
  } else if (v.isDouble()) {
    key.push_back(kDouble);
    key.push_back(std::bit_cast<uint64_t>(v.toDouble()));
  } else if (v.isIntList()) {
    const auto list = v.toIntList();
    key.push_back(kInts);
    key.push_back(list.size());
    for (const int64_t i : list) key.push_back(static_cast<uint64_t>(i));
  } else if (v.isBoolList()) {
    key.push_back(kBools);
    uint64_t bits = 1;
    for (const bool b : v.toBoolList()) bits = (bits << 1) | (b ? 1U : 0U);
    key.push_back(bits);
  } else if (v.isDoubleList()) {
    const auto list = v.toDoubleList();
    key.push_back(kDoubles);
    key.push_back(list.size());
    for (const double d : list) key.push_back(std::bit_cast<uint64_t>(d));
  } else if (v.isString()) {
    append_string(v.toStringRef(), key);
  } else if (v.isDevice()) {
    const c10::Device device = v.toDevice();
    key.push_back(kDevice);
    key.push_back((static_cast<uint64_t>(device.type()) << 32) | static_cast<uint16_t>(device.index()));
  } else if (v.isGenerator()) {
    key.push_back(kGenerator);
  } else {
    return false;
  }
  return true;
}

}  // namespace

bool append_key(const Call& call, c10::SmallVectorImpl<uint64_t>& key) {
  key.push_back(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));  // what integers become, as by sqrt
  key.push_back(meets_odd_number(call) ? 1 : 0);
  std::size_t next = 0;  // in call.tensors, which are in schema order
  for (std::size_t i = 0; i < call.traits.num_args; ++i) {
    const bool tensors = next < call.tensors.size() && call.tensors[next].arg == i;
    if (!tensors) {
      if (!append_value(call.arg(i), call.traits.number_arg[i], key)) {
        if (!(call.arg(i).isTensorList() || call.arg(i).isOptionalTensorList())) return false;
        key.push_back(0);  // an empty list of tensors
      }
      continue;
    }
    const std::size_t begin = next;
    while (next < call.tensors.size() && call.tensors[next].arg == i) ++next;
    key.push_back(1000 + (next - begin));
    for (std::size_t t = begin; t < next; ++t) {
      const TensorArg& entry = call.tensors[t];
      if (entry.spec != nullptr) {
        key.push_back((entry.spec->id << 1) | (detail::is_dtensor(*entry.tensor) ? 1U : 0U));
      } else if (!entry.tensor->defined()) {
        key.push_back(0);
      } else {  // plain, without dimensions
        const at::Tensor& plain = *entry.tensor;
        key.push_back((1ULL << 63) | (static_cast<uint64_t>(plain.scalar_type()) << 16) |
                      (static_cast<uint64_t>(plain.device().type()) << 8) |
                      (plain.unsafeGetTensorImpl()->is_wrapped_number() ? 1U : 0U));
      }
    }
  }
  return true;
}

}  // namespace tessera::dispatch
