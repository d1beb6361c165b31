#pragma once

#include <string>
#include <vector>

#include "tessera/bench/measure.h"
#include "tessera/bench/redistribute_cases.h"

namespace tessera::bench {

struct RedistributeRow {
  RedistributeCase of;
  bool communicates = false;
  std::string refused;     // why the peer does not do it
  Figure ours, raw, peer;  // the slowest rank's
  // Medians of each round's own ratios: drift meets both sides alike.
  double peer_to_ours = 0;
  double ours_to_raw = 0;

  bool has_peer() const { return refused.empty(); }
};

void print_row(const RedistributeRow& row);
// Over the rows that communicate: geometric means, the least row, changes of Shards apart, and what is added to raw
// calls. Then what the peer refused, and why.
void print_summary(const std::vector<RedistributeRow>& rows);
// What is wanted of them over `backend`.
std::vector<Goal> goals_of(const std::string& backend, const std::vector<RedistributeRow>& rows);
void write_redistribute_json(const std::string& path, const std::string& backend,
                             const std::vector<RedistributeRow>& rows);

}  // namespace tessera::bench
