#pragma once

#include <string>
#include <vector>

#include "tessera/mesh/record_file.h"

namespace tessera {

// Says where ranks of a failed job first did different things: the first collective of which the ranks of its group
// have begun different ones (another kind, operator or path), or to which some of them have not come. Text for people:
// that collective with what each rank began in its place, and then each rank's failure, how many of its records were
// overwritten, and what it had not ended. Ranks whose records are missing, as those of a killed process, are listed.
//
// Collectives of a group are compared by their numbers (Record::serial), which are alike on all ranks as long as the
// recorder was on. Where a ring has lost a rank's older records, the comparison starts behind them; that a rank has not
// come to one of those shows by the ranks' counts. A group with a rank that has left no records parts at the latest in
// the first collective for which one of the others waits (or which it has not ended).
//
// Where several groups part, it names one that does not follow from another: a rank that waits in a collective of one
// group cannot come to one of another group. Where there are several of these, it takes the first in the program, which
// ranks are taken to run alike: one of the ranks has begun its own collective of that mesh dimension and number before
// the other one. Where that says nothing, it takes the earliest by the ranks' clocks, which may differ between hosts.
std::string where_ranks_part(const std::vector<RankRecords>& ranks);

}  // namespace tessera
