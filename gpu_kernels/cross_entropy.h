#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "tessera/gpu_kernels/interface.h"
#include "tessera/gpu_kernels/numbers.h"

// One thread of a GPU does this in the cross entropy of logits whose classes are cut. Tests call it on the host.
namespace tessera::gpu {

// Returns exp(x). For 16-bit numbers a GPU takes the fast one, whose error is far below that of their rounding.
template <class T>
TESSERA_BOTH Computed<T> exp_for(Computed<T> x) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsShortFloat<T>) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x * std::numbers::log2e_v<float>));
    return out;
  }
#endif
  return std::exp(x);
}

// Holds the greatest of some numbers x, and the sum of exp(x - greatest). That of no numbers is {-inf, 0}. Numbers that
// are all -inf have the sum 0, and where one is not a number or +inf, the sum is not a number.
template <class C>
struct ExpSum {
  C greatest = -std::numeric_limits<C>::infinity();
  C sum = 0;
};

// Returns the sum of both relative to `greatest`, which is at least sum.greatest.
template <class C>
TESSERA_BOTH C relative_to(const ExpSum<C>& sum, C greatest) {
  return sum.greatest == greatest ? sum.sum : sum.sum * std::exp(sum.greatest - greatest);
}

template <class C>
TESSERA_BOTH ExpSum<C> merged(const ExpSum<C>& a, const ExpSum<C>& b) {
  const C greatest = std::fmax(a.greatest, b.greatest);
  return {greatest, relative_to(a, greatest) + relative_to(b, greatest)};
}

// Adds N numbers to a sum.
template <int N, class T>
TESSERA_BOTH void add_to(ExpSum<Computed<T>>& sum, const T (&values)[N]) {
  using C = Computed<T>;
  C greatest = sum.greatest;
  TESSERA_UNROLL
  for (int i = 0; i < N; ++i)
    greatest = std::fmax(greatest, static_cast<C>(values[i]));  // passes over what is no number
  const C origin = greatest == -std::numeric_limits<C>::infinity() ? C(0) : greatest;
  C added = 0;
  TESSERA_UNROLL
  for (int i = 0; i < N; ++i) added += exp_for<T>(static_cast<C>(values[i]) - origin);
  sum.sum = relative_to(sum, greatest) + added;
  sum.greatest = greatest;
}

// A row is read in groups of 16 bytes that begin at multiples of 16 bytes. The first and the last group may have
// columns before and behind the row.
template <class T>
inline constexpr int kRowGroup = static_cast<int>(16 / sizeof(T));

// Returns how many numbers lie between the last multiple of 16 bytes and `row`.
template <class T>
TESSERA_BOTH int misaligned(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
}

// Returns where a row of logits begins; nullptr where rows have no columns, since they may have no memory either.
template <class T, class Request>
TESSERA_BOTH const T* logits_of(const Request& request, int64_t row) {
  return request.columns == 0 ? nullptr : static_cast<const T*>(request.logits) + row * request.stride;
}

// Returns the sum over the groups of a row that are `thread` modulo `threads`. Two groups are read before either is
// used, so that a multiprocessor has enough readings under way.
template <class T>
TESSERA_BOTH ExpSum<Computed<T>> sum_of_row(const LogitSums& request, int64_t row, int thread, int threads) {
  constexpr int kGroup = kRowGroup<T>;
  const T* const at = logits_of<T>(request, row);
  const int before = misaligned(at);
  const T missing = number<T>(-std::numeric_limits<float>::infinity());
  ExpSum<Computed<T>> sum;
  for (int64_t first = thread * kGroup - before; first < request.columns; first += 2 * threads * kGroup) {
    T groups[2][kGroup];
    load_group(groups[0], at, first, request.columns, /*aligned=*/true, missing);
    load_group(groups[1], at, first + threads * kGroup, request.columns, /*aligned=*/true, missing);
    T values[2 * kGroup];
    TESSERA_UNROLL
    for (int i = 0; i < 2 * kGroup; ++i) values[i] = groups[i / kGroup][i % kGroup];
    add_to(sum, values);
  }
  return sum;
}

inline TESSERA_BOTH bool is_ignored(const LogitTargets& targets, int64_t row) {
  return targets.of_row[row] == targets.ignored;
}
// Says whether the row's class is one, or is to be ignored.
inline TESSERA_BOTH bool is_valid(const LogitTargets& targets, int64_t row) {
  return is_ignored(targets, row) || (targets.of_row[row] >= 0 && targets.of_row[row] < targets.classes);
}
// Returns this rank's column of the row's class, or -1 where it has none.
inline TESSERA_BOTH int64_t column_of(const LogitTargets& targets, int64_t row, int64_t columns) {
  const int64_t target = targets.of_row[row];
  return target >= targets.begin && target - targets.begin < columns ? target - targets.begin : -1;
}

// Stores a row's results, of which `sum` is over all its columns.
template <class T>
TESSERA_BOTH void store_sums(const LogitSums& request, int64_t row, const ExpSum<Computed<T>>& sum) {
  using C = Computed<T>;
  const T* const at = logits_of<T>(request, row);
  const int64_t column = column_of(request.targets, row, request.columns);
  static_cast<C*>(request.greatest)[row] = sum.greatest;
  static_cast<C*>(request.exps)[row] = sum.sum;
  static_cast<C*>(request.picked)[row] = column < 0 ? C(0) : static_cast<C>(at[column]);
}

// Writes a row's terms; that of the columns is written with the first row's.
template <class C>
TESSERA_BOTH void store_terms(const LogitTerms& request, int64_t row) {
  const auto of = [row](const void* numbers) { return static_cast<const C*>(numbers)[row]; };
  C* const out = static_cast<C*>(request.out);
  const C of_all = of(request.of_all);
  const bool here = column_of(request.targets, row, request.columns) >= 0;
  out[request.rows + row] = here ? of(request.picked) - of_all : C(0);
  out[row] = of(request.exps) * std::exp(of(request.greatest) - of_all);
  if (row == 0) out[2 * request.rows] = static_cast<C>(request.columns);
}

// Returns the weight of a row in the mean.
template <class C>
TESSERA_BOTH C weight_of(const LogitTargets& targets, const void* weight, int64_t row) {
  if (is_ignored(targets, row)) return 0;
  return weight == nullptr ? C(1) : static_cast<const C*>(weight)[row];
}

template <class C>
TESSERA_BOTH void store_loss(const LogitLosses& request, int64_t row) {
  const C* const sums = static_cast<const C*>(request.sums);
  const C weight = weight_of<C>(request.targets, request.weight, row);
  const C loss = (std::log(sums[row]) - sums[request.rows + row]) * weight;
  C* const out = static_cast<C*>(request.out);
  out[row] = is_ignored(request.targets, row) ? C(0) : loss;  // whatever its logits are
  out[request.rows + row] = weight;
}

// Writes those groups of a row's gradient that are `thread` modulo `threads`.
template <class T>
TESSERA_BOTH void gradient_of_row(const LogitGradient& request, int64_t row, int thread, int threads) {
  using C = Computed<T>;
  constexpr int kGroup = kRowGroup<T>;
  const T* const in = logits_of<T>(request, row);
  T* const out = static_cast<T*>(request.out) + row * request.columns;
  const bool aligned = misaligned(in) == misaligned(out);
  const C greatest = static_cast<const C*>(request.of_all)[row];
  const C gradient = static_cast<const C*>(request.gradient)[row * request.gradient_stride];
  const C of_row = request.total == nullptr ? gradient : gradient / *static_cast<const C*>(request.total);
  const C on_class = of_row * weight_of<C>(request.targets, request.weight, row);
  const C on_exps = on_class / static_cast<const C*>(request.exps)[row];
  const bool kept = !is_ignored(request.targets, row);
  const int64_t column = column_of(request.targets, row, request.columns);
  for (int64_t first = thread * kGroup - misaligned(out); first < request.columns; first += threads * kGroup) {
    T values[kGroup];
    load_group(values, in, first, request.columns, aligned, T(0));
    TESSERA_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      C value = exp_for<T>(static_cast<C>(values[i]) - greatest) * on_exps;
      if (first + i == column) value -= on_class;
      values[i] = number<T>(kept ? value : C(0));
    }
    store_group(out, values, first, request.columns, /*aligned=*/true);
  }
}

}  // namespace tessera::gpu
