#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/recorder.h"

namespace tessera {

// Holds what one rank's recorder held when its job failed.
struct RankRecords {
  int64_t rank = 0;
  std::string failure;                  // the text that this rank threw or saw
  std::vector<CollectiveCount> counts;  // of the collectives that it has begun; empty in files of earlier versions
  std::vector<Record> records;          // oldest first; of some of these collectives the ring holds none any more
  friend bool operator==(const RankRecords&, const RankRecords&) = default;
};

// Returns the file of `rank` in a folder of such files.
std::string records_file(const std::string& folder, int64_t rank);
// Writes the rank's file, one JSON value a line, after making the folder. Both are for this user alone: error texts and
// names of modules may be private. The file appears all at once and replaces an earlier one. Throws std::runtime_error
// with the path and the system's text, or where the folder is neither this user's nor root's.
void write_records(const std::string& folder, const RankRecords& records);
// Makes the folder, and returns "" or why it cannot hold records. Removes what an earlier job or attempt has left of
// this rank, and on rank 0 of all ranks that this job of `size` ranks does not have. Every rank calls it when the job
// starts. Never throws.
std::string prepare_records(const std::string& folder, int64_t rank, int64_t size) noexcept;
// Reads the files of all ranks in `folder`, by rank; what has another name than records_file() gives is left alone.
// Throws std::invalid_argument when there is none, and std::runtime_error on one that write_records() has not written.
std::vector<RankRecords> read_all_records(const std::string& folder);

// ---- for the library ----------------------------------------------------------------------------------------------
// Return records of one rank as bytes to send, and from such bytes. Throw where they are no records.
std::vector<uint8_t> encode_records(const std::vector<Record>& records);
std::vector<Record> decode_records(const std::vector<uint8_t>& bytes, int64_t rank);

}  // namespace tessera
