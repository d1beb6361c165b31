#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace embed {

// Holds the tokens of a batch of sentences, padded with [PAD] to the longest one: row-major [sentences, length].
struct Batch {
  int64_t sentences = 0;
  int64_t length = 0;
  std::vector<int64_t> ids;
  std::vector<int64_t> mask;  // 1 for a token, 0 for padding
};

// Tokenizes like uncased BERT. It cleans the text, makes it lower case without accents, splits it at spaces,
// punctuation and Chinese characters, and then applies WordPiece, which takes the longest piece of the vocabulary
// first; a word that the pieces cannot spell is [UNK].
//   "Déjà vu!"  ->  [CLS] deja vu ! [SEP]      "unaffable"  ->  [CLS] una ##ffa ##ble [SEP]
//
// It removes combining marks and control characters everywhere, and folds letters if the result is in the vocabulary
// (Latin, Greek, Cyrillic, Hebrew, Arabic, kana, Hangul and others; see unicode_tables.h). The text "[SEP]" in a
// sentence is five characters, not the separator. Characters newer than Unicode 8 may be split differently by
// tokenizers with older or newer tables.
//
// Source: J. Devlin et al., BERT (2018), and the reference tokenizer published with it. Tests compare with the Python
// package `tokenizers`.
class Tokenizer {
 public:
  static constexpr int64_t kMaxLength =
      256;  // the published limit of all-MiniLM-L6-v2; its position table has 512 rows

  // `vocabulary` has the piece with id i at index i. Throws std::invalid_argument when [PAD], [UNK], [CLS] or [SEP] is
  // missing, or a piece occurs twice.
  explicit Tokenizer(const std::vector<std::string>& vocabulary);

  // Reads vocab.txt, which has one piece per line. Throws std::invalid_argument when it cannot be read.
  static Tokenizer from_file(const std::string& path);

  // Returns the ids of [CLS] ... [SEP], cut to `max_length` ids. Throws std::invalid_argument when max_length < 2.
  std::vector<int64_t> encode(std::string_view text, int64_t max_length = kMaxLength) const;

  // Encodes every sentence and pads all to the longest.
  Batch encode_batch(const std::vector<std::string>& sentences, int64_t max_length = kMaxLength) const;

  int64_t vocabulary_size() const { return static_cast<int64_t>(ids_.size()); }

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };

  int64_t special(const char* piece) const;
  void append_pieces(const std::string& word, std::vector<int64_t>& out) const;

  std::unordered_map<std::string, int64_t, Hash, std::equal_to<>> ids_;
  int64_t pad_ = 0;
  int64_t unk_ = 0;
  int64_t cls_ = 0;
  int64_t sep_ = 0;
};

// Returns the words to which WordPiece is applied: cleaned, folded and split as above.
//   "It's 5€ naïve" -> it ' s 5€ naive
std::vector<std::string> basic_tokens(std::string_view text);

}  // namespace embed
