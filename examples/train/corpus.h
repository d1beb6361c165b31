#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace train {

// Says what became of a file.
enum class Use { kTraining, kHeldOut, kRepetition };

struct ManifestLine {
  std::string path;  // below the corpus's folder
  int64_t bytes = 0;
  Use use = Use::kTraining;
};

// Holds the text to train on and the text to measure by, as bytes. Both follow from the files alone, so every rank that
// reads the same folder has the same.
struct Corpus {
  std::string training;
  std::string held_out;
  std::vector<ManifestLine> manifest;  // in the order of the paths' bytes
  std::string hash;                    // SHA-1 of the manifest and of both texts
};

struct CorpusFolder {
  std::string path;
  std::vector<std::string> parts;  // the subfolders to read; all of it where there are none
};

// Returns LibTorch's own headers, beside the library that this program has loaded.
CorpusFolder libtorch_headers();

// Reads all files of text below a folder: those without a zero byte, in the order of their paths. Hidden files and
// folders are left out.
//
// Families of near-duplicates are dropped, as is all but the first few of a thousand files that a generator has made of
// one template. A line's shape is what remains of it without blanks and with "a" for each word, so that a template's
// lines have one shape whatever names were filled in. A file is dropped when more than half of its runs of three
// lines have a shape that came before, in the file or in those kept. Hand-written code seldom repeats three lines.
//
// One in 32 name stems is held out, by the order of their hashes. A stem is the name up to the first dot, and is cut
// down to the shortest other file's name that it begins with: add.h, add_ops.h and add_cpu_dispatch.h have the stem
// "add", and so are on one side. So are files of one name in several folders.
//
// Throws std::invalid_argument when there is no such folder, or it has fewer than two stems of text.
Corpus read_corpus(const CorpusFolder& folder);

// Returns the stem of a file: `names` has the names of all files up to their first dot.
std::string stem_of(const std::string& path, const std::set<std::string>& names);

// Returns the shapes of the lines of a text, without those of blanks.
std::vector<std::string> shapes_of_lines(const std::string& text);

// Returns "3,120,480 of 32,091,751 bytes ...": one line that says how much was read, kept, dropped and held out.
std::string summary_of(const Corpus& corpus);

}  // namespace train
