#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include <ATen/core/ivalue.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/SmallVector.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/call.h"

namespace tessera::dispatch {

// Collects the words that identify everything that a decision depends on. append_key and the kernels of unboxed.h must
// append the same words for the same argument.
//
// Invariant: hash() is the hash of words().
class Key {
 public:
  // `zero_or_nonfinite` is the result of has_zero_or_nonfinite_number.
  explicit Key(bool zero_or_nonfinite) {
    // The default dtype is part of the key: operators such as sqrt convert integers to it.
    put((static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 1) | (zero_or_nonfinite ? 1 : 0));
  }

  void none() { put(kNone); }
  void integer(int64_t value) {
    put(kInt);
    put(static_cast<uint64_t>(value));
  }
  void boolean(bool value) {
    put(kBool);
    put(value ? 1 : 0);
  }
  void real(double value) {
    put(kDouble);
    put(std::bit_cast<uint64_t>(value));
  }
  template <class List>
  void integers(const List& list) {
    put(kInts);
    put(list.size());
    for (const int64_t i : list) put(static_cast<uint64_t>(i));
  }
  template <class List>
  void reals(const List& list) {
    put(kDoubles);
    put(list.size());
    for (const double d : list) put(std::bit_cast<uint64_t>(d));
  }
  template <class List>
  void booleans(const List& list) {
    put(kBools);
    uint64_t bits = 1;  // above the booleans, so that their number is in the word
    for (const bool b : list) {
      bits = (bits << 1) | (b ? 1U : 0U);
      if (bits >> 63 == 0) continue;
      put(bits);
      bits = 1;
    }
    put(bits);
  }
  // Appends a number's type, which takes part in type promotion, and not its value (OpTraits::decides_by_numbers).
  void number(bool is_int, bool is_double, bool is_bool) {
    put(kNumber + 16UL * (is_int ? 1U : is_double ? 2U : is_bool ? 3U : 4U));
  }
  void text(std::string_view value);
  void device(c10::Device value) {
    put(kDevice);
    put((static_cast<uint64_t>(value.type()) << 32) | static_cast<uint16_t>(value.index()));
  }
  void generator() { put(kGenerator); }
  // Appends how many tensors an argument holds, unless it is one tensor. The words of the tensors follow.
  void tensors(std::size_t count) {
    if (count != 1) put(kTensors + count);
  }
  void absent() { put(kAbsent); }
  void dtensor(const Spec& spec) { put(kOfSpec | (spec.id << 1) | 1U); }
  void replicated(const Spec& spec) { put(kOfSpec | (spec.id << 1)); }
  void plain(const at::Tensor& t);

  uint64_t hash() const { return hash_; }
  const c10::SmallVectorImpl<uint64_t>& words() const { return words_; }

 private:
  enum Tag : uint64_t {
    kNone = 1,
    kInt,
    kDouble,
    kBool,
    kInts,
    kDoubles,
    kBools,
    kDevice,
    kString,
    kGenerator,
    kNumber,  // 16 times the number's type (1 to 4) is added; the sum is less than kAbsent
    kAbsent = 100,
    kTensors = 1000,
    kOfSpec = 1ULL << 62,
    kPlain = 1ULL << 63
  };

  void put(uint64_t word) {
    words_.push_back(word);
    hash_ = (hash_ ^ word) * 0xff51afd7ed558ccdULL;
    hash_ ^= hash_ >> 32;
  }

  c10::SmallVector<uint64_t, 32> words_;
  uint64_t hash_ = 0x9e3779b97f4a7c15ULL;
};

// Appends what a decision depends on. Returns false when some argument cannot be put in a key.
bool append_key(const Call& call, Key& key);

}  // namespace tessera::dispatch
