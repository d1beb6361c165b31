#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Writes short files that other processes wait for, also when the disk has become full: the space of each is reserved
// at the start. No descriptor is kept for that, since a launcher already holds two for each rank.
//
// Invariants:
//   - At each path there is no file or a whole note.
//   - While no note is written, its space is in a file PATH.part.
class ReservedNotes {
 public:
  // Removes what is at `paths`, and reserves space for a note at each. Throws std::runtime_error when that fails.
  explicit ReservedNotes(std::vector<std::string> paths);
  // Gives back the space of the notes that were not written.
  ~ReservedNotes();
  ReservedNotes(const ReservedNotes&) = delete;
  ReservedNotes& operator=(const ReservedNotes&) = delete;

  // Writes the note at one of the paths. Call it once for each. Returns whether the note is there: a text of more than
  // 128 bytes may not fit on a full disk.
  static bool write(const std::string& path, std::string_view text);

 private:
  void remove_parts() const;

  const std::vector<std::string> paths_;
};

}  // namespace tessera
