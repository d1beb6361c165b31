#pragma once

#include <string>
#include <vector>

#include "tessera/mesh/record_file.h"

namespace tessera {

// Says where ranks of a failed job first did different things: the earliest collective of which the ranks of its group
// have begun different ones (another kind, operator or path), or to which some of them have not come. Text for people:
// each rank's failure, that collective with what each rank began in its place, and what each rank had not ended. Ranks
// whose records are missing, as those of a killed process, are listed.
//
// Collectives of a group are compared by their numbers (Record::serial), which are alike on all ranks as long as the
// recorder was on. Where a ring has lost a rank's older records, also all that it had of a group, the comparison starts
// behind them.
std::string where_ranks_part(const std::vector<RankRecords>& ranks);

}  // namespace tessera
