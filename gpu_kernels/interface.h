#pragma once

#include <cstdint>

// The program and libtessera_gpu.so share these declarations alone: plain data and functions of C. The library is
// compiled by nvcc, without LibTorch's headers.
namespace tessera::gpu {

// Is to be raised by one whenever anything in this header changes.
inline constexpr int kInterfaceVersion = 5;

enum class Kind : int32_t {
  kUniform,      // a: from, b: to
  kNormal,       // a: mean, b: deviation
  kExponential,  // a: rate
  kIntegers,     // first, range (0: all 2^64)
  kBernoulli,    // a: probability
};

enum class Number : int32_t { kFloat, kDouble, kHalf, kBfloat16, kByte, kChar, kShort, kInt, kLong, kBool };

inline constexpr int kMaxDims = 16;
inline constexpr int kMaxIntervals = 64;

// Describes the indices that a rank holds of one dimension, in ascending order. With count == 0 they are blocks of
// `block` indices that begin at begin, begin + period, ...; the last one may be shorter. Else they are `count`
// intervals of PieceTable::intervals, from `first` on.
struct Dim {
  int64_t size;  // of the global tensor
  int64_t held;  // how many indices the rank holds
  int64_t begin;
  int64_t block;
  int64_t period;
  int32_t first;
  int32_t count;
};

struct HeldInterval {
  int64_t begin;   // in the global tensor
  int64_t before;  // how many indices of the dimension the rank holds below `begin`
};

// Describes which part of a row-major global tensor a rank holds. The piece is row-major too.
struct PieceTable {
  int32_t ndim;  // at least one
  int32_t unused;
  Dim dims[kMaxDims];
  HeldInterval intervals[kMaxIntervals];
};
static_assert(sizeof(PieceTable) < 4000);  // it is passed to kernels by value

struct Draw {
  Kind kind;
  Number number;
  void* out;      // on the current device
  int64_t count;  // numbers in the piece
  uint64_t seed;
  uint64_t draw;
  const uint64_t* base;  // on the current device, is added to `draw`; may be null
  double a;
  double b;
  int64_t first;
  uint64_t range;
  PieceTable piece;
};

// Drops elements of a piece: mask[i] says whether element i is kept, as a draw of kBernoulli with probability `kept`
// does, and out[i] is in[i] * mask[i] * scale. All three are row-major, and `number` is a floating-point one.
struct Dropout {
  Number number;
  const void* in;
  void* out;
  bool* mask;
  int64_t count;
  uint64_t seed;
  uint64_t draw;
  const uint64_t* base;  // as in Draw
  double kept;
  double scale;
  PieceTable piece;
};

// Are the classes that the rows of a rank's logits are to have.
struct LogitTargets {
  const int64_t* of_row;  // [rows]; each is from 0 to classes - 1, or `ignored`
  int64_t ignored;
  int64_t classes;
  int64_t begin;  // the class of this rank's first column
};

// Reads the logits of each row once: their greatest one, the sum of exp(x - greatest), and the one of its class, or 0
// where that is another rank's. Results are double where the logits are, else float. A class that is out of bounds ends
// the process's use of the GPU by a device-side assertion.
struct LogitSums {
  Number number;
  const void* logits;  // a row-major [rows, columns], whose rows begin `stride` numbers apart
  int64_t rows;
  int64_t columns;
  int64_t stride;
  LogitTargets targets;
  void* greatest;  // [rows]
  void* exps;
  void* picked;
};

// Makes of a rank's sums its terms of the sums over all ranks:
//   out[i] = exps[i] * exp(greatest[i] - of_all[i])
//   out[rows + i] = picked[i] - of_all[i], or 0 where the class is another rank's
//   out[2 * rows] = columns
struct LogitTerms {
  Number number;  // of all that follows: kFloat or kDouble
  int64_t rows;
  int64_t columns;
  LogitTargets targets;
  const void* greatest;
  const void* exps;
  const void* picked;
  const void* of_all;  // the greatest logits of all ranks
  void* out;           // [2 * rows + 1]
};

// Makes losses of the sums over all ranks, as LogitTerms gives them. With w = weight[i], 1 where `weight` is null, or 0
// for an ignored row:
//   out[i] = (log(sums[i]) - sums[rows + i]) * w, or 0 for an ignored row
//   out[rows + i] = w
struct LogitLosses {
  Number number;
  int64_t rows;
  LogitTargets targets;
  const void* sums;    // [2 * rows]
  const void* weight;  // [rows] or null
  void* out;           // [2 * rows]
};

// Writes the gradient of the losses by the logits. With g = gradient[i * gradient_stride] / total, where `total` is not
// null, and w as in LogitLosses, it is for row i and column c, and 0 for an ignored row:
//   exp(logits[i, c] - of_all[i]) * (g * w / exps[i]) - (the column is that of the class ? g * w : 0)
struct LogitGradient {
  Number number;
  const void* logits;
  void* out;  // a row-major [rows, columns]
  int64_t rows;
  int64_t columns;
  int64_t stride;
  LogitTargets targets;
  const void* of_all;  // [rows], like the results of LogitSums
  const void* exps;    // of all ranks
  const void* weight;  // [rows] or null
  const void* gradient;
  int64_t gradient_stride;
  const void* total;  // one number or null
};

// Looks up rows in a table of `rows` rows of which a rank holds those from `begin` to `end` - 1: out[i] is the row that
// ids[i] names, or zeros where the rank lacks it. Rows are copied as words of `word` bytes, 1, 2, 4, 8 or 16, which
// divide all addresses. An id outside [0, rows) ends the process's use of the GPU by a device-side assertion.
struct MaskedRows {
  Number index;  // of ids: kInt or kLong
  int32_t word;
  const void* ids;    // [count]
  const void* table;  // the rows held, which begin `stride` words apart
  void* out;          // a row-major [count, words]
  int64_t count;
  int64_t words;  // in a row
  int64_t stride;
  int64_t begin;
  int64_t end;
  int64_t rows;
};

inline constexpr int kCopyDims = 5;

// Copies fewer than 2^31 words of `word` bytes, 1, 2, 4, 8 or 16, which divide both addresses, between parts of memory
// that do not overlap. Both have the same sizes, and strides of their own, in words.
struct Copy {
  const void* from;
  void* to;
  int32_t word;
  int32_t ndim;  // at least one
  int32_t sizes[kCopyDims];
  int32_t unused;
  int64_t from_strides[kCopyDims];
  int64_t to_strides[kCopyDims];
};

// Makes all copies, in any order. None may write what another one reads or writes.
struct Copies {
  const Copy* copies;  // in the host's memory, which is free again when the call returns
  int64_t count;
};

}  // namespace tessera::gpu

extern "C" {
// Each gives its work to the stream, of the current device, and returns a cudaError_t. None waits. All memory that a
// request points to is on the current device, but where it says otherwise.
int tessera_gpu_draw(const tessera::gpu::Draw* request, void* cuda_stream);
int tessera_gpu_dropout(const tessera::gpu::Dropout* request, void* cuda_stream);
int tessera_gpu_logit_sums(const tessera::gpu::LogitSums* request, void* cuda_stream);
int tessera_gpu_logit_terms(const tessera::gpu::LogitTerms* request, void* cuda_stream);
int tessera_gpu_logit_losses(const tessera::gpu::LogitLosses* request, void* cuda_stream);
int tessera_gpu_logit_gradient(const tessera::gpu::LogitGradient* request, void* cuda_stream);
int tessera_gpu_masked_rows(const tessera::gpu::MaskedRows* request, void* cuda_stream);
int tessera_gpu_copy(const tessera::gpu::Copies* request, void* cuda_stream);
int tessera_gpu_interface_version();
}

namespace tessera::gpu {

// Holds the library's functions.
struct Kernels {
  decltype(&tessera_gpu_draw) draw;
  decltype(&tessera_gpu_dropout) dropout;
  decltype(&tessera_gpu_logit_sums) logit_sums;
  decltype(&tessera_gpu_logit_terms) logit_terms;
  decltype(&tessera_gpu_logit_losses) logit_losses;
  decltype(&tessera_gpu_logit_gradient) logit_gradient;
  decltype(&tessera_gpu_masked_rows) masked_rows;
  decltype(&tessera_gpu_copy) copy;
};

}  // namespace tessera::gpu
