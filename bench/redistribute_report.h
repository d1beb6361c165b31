#pragma once

#include <string>
#include <vector>

#include "tessera/bench/measure.h"
#include "tessera/bench/redistribute_cases.h"

namespace tessera::bench {

struct RedistributeRow {
  RedistributeCase of;
  bool communicates = false;
  std::string refused;     // why the peer refuses the case, or empty
  Figure ours, raw, peer;  // of the slowest rank
  // These are medians of each round's ratios, so that drift affects both sides equally.
  double peer_to_ours = 0;
  double ours_to_raw = 0;

  bool has_peer() const { return refused.empty(); }
};

void print_row(const RedistributeRow& row);
// Prints, for the rows that communicate, the geometric mean, the least and the most of peer/ours and ours/raw, and of
// peer/ours for changes of Shards separately. Then prints how many rows the peer refused, and why.
void print_summary(const std::vector<RedistributeRow>& rows);
// Returns the goals of `rows` over `backend`.
std::vector<Goal> goals_of(const std::string& backend, const std::vector<RedistributeRow>& rows);
void write_redistribute_json(const std::string& path, const std::string& backend,
                             const std::vector<RedistributeRow>& rows);

}  // namespace tessera::bench
