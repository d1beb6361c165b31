#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

// Is one round of an all-to-all: a rank sends to the coordinates in [send_begin, send_end) and receives from those in
// [receive_begin, receive_end), in one group of operations.
struct ExchangeRound {
  int64_t send_begin;
  int64_t send_end;
  int64_t receive_begin;
  int64_t receive_end;

  int64_t operations() const { return send_end - send_begin + receive_end - receive_begin; }
  friend bool operator==(const ExchangeRound&, const ExchangeRound&) = default;
};

// NCCL starts all sends and receives of an all-to-all as one group. Larger groups than this one are split.
inline constexpr int64_t kMostGroupedOperations = 256;

// Returns the rounds in which coordinate `here` of `n` exchanges with all of them, itself included, each of at most
// `most` operations. The coordinates are cut into blocks of equal sizes, of which the last may be smaller; in round t
// each block sends to the block t places further, and receives from the one t places before:
//   n = 4, here = 0, most = 4 -> sends to [0, 2), receives from [0, 2); sends to [2, 4), receives from [2, 4)
//
// Every rank has as many rounds as the others, and where a rank sends to another in round t, that one receives in its
// round t: ranks that execute their rounds in order cannot wait for each other in a circle.
//
// Throws std::invalid_argument if `here` is outside [0, n) or most < 2.
std::vector<ExchangeRound> exchange_rounds(int64_t n, int64_t here, int64_t most = kMostGroupedOperations);

}  // namespace tessera
