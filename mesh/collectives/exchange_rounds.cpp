#include "tessera/mesh/collectives/exchange_rounds.h"

#include <algorithm>
#include <stdexcept>

#include <fmt/format.h>

namespace tessera {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace

std::vector<ExchangeRound> exchange_rounds(int64_t n, int64_t here, int64_t most) {
  if (here < 0 || here >= n || most < 2) {
    throw std::invalid_argument(
        fmt::format("exchange_rounds: coordinate {} of {}, at most {} operations; give a coordinate in [0, {}) and at "
                    "least 2 operations",
                    here, n, most, n));
  }
  const int64_t size = ceil_div(n, ceil_div(n, most / 2));  // of a block
  const int64_t blocks = ceil_div(n, size);
  std::vector<ExchangeRound> rounds;
  for (int64_t t = 0; t < blocks; ++t) {
    const int64_t to = (here / size + t) % blocks;
    const int64_t from = (here / size + blocks - t) % blocks;
    rounds.push_back({.send_begin = to * size,
                      .send_end = std::min(to * size + size, n),
                      .receive_begin = from * size,
                      .receive_end = std::min(from * size + size, n)});
  }
  return rounds;
}

}  // namespace tessera
