#include "tessera/examples/embed/tokenizer.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/examples/embed/unicode_tables.h"
#include "tessera/examples/embed/utf8.h"

namespace embed {
namespace {

constexpr std::size_t kMaxWordLength = 100;  // in characters; a longer word becomes [UNK]

template <std::size_t kCount>
bool contains(const CodePointRange (&ranges)[kCount], char32_t code) {
  const auto* const after = std::upper_bound(std::begin(ranges), std::end(ranges), code,
                                             [](char32_t c, const CodePointRange& range) { return c < range.first; });
  return after != std::begin(ranges) && code <= std::prev(after)->last;
}

bool is_space(char32_t code) {
  return code == U' ' || code == U'\t' || code == U'\n' || code == U'\r' || code == 0xA0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F ||
         code == 0x3000;
}

// Returns true for Han characters, each of which is a word: the CJK Unified Ideographs blocks and their compatibility
// forms.
bool is_chinese(char32_t code) {
  return (code >= 0x4E00 && code <= 0x9FFF) || (code >= 0x3400 && code <= 0x4DBF) ||
         (code >= 0x20000 && code <= 0x2A6DF) || (code >= 0x2A700 && code <= 0x2CEAF) ||
         (code >= 0xF900 && code <= 0xFAFF) || (code >= 0x2F800 && code <= 0x2FA1F);
}

// Looks `code` up in a table of groups of `width` characters whose first one is the key; returns the rest of the group.
std::u32string_view find_folded(std::u32string_view table, std::size_t width, char32_t code) {
  std::size_t low = 0;
  std::size_t high = table.size() / width;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    (table[middle * width] < code ? low = middle + 1 : high = middle);
  }
  const std::size_t at = low * width;
  return at < table.size() && table[at] == code ? table.substr(at + 1, width - 1) : std::u32string_view();
}

// Splits a Hangul syllable into its letters, by Unicode's arithmetic rule.
void append_hangul(std::u32string& out, char32_t code) {
  const char32_t index = code - 0xAC00;
  out += 0x1100 + index / 588;
  out += 0x1161 + index % 588 / 28;
  if (index % 28 != 0) out += 0x11A7 + index % 28;
}

void append_folded(std::u32string& out, char32_t code) {
  if (code >= 0xAC00 && code <= 0xD7A3) return append_hangul(out, code);
  if (const auto one = find_folded(kFolded, 2, code); !one.empty()) {
    out += one;
  } else if (const auto two = find_folded(kFoldedToTwo, 3, code); !two.empty()) {
    out += two;
  } else {
    out += code;
  }
}

// Spaces become ' ', Chinese characters get one on each side, the rest is folded.
std::u32string clean(std::string_view text) {
  std::u32string out;
  for (const char32_t code : decode_utf8(text)) {
    if (contains(kRemoved, code)) continue;
    if (is_space(code)) {
      out += U' ';
    } else if (is_chinese(code)) {
      out += U' ';
      append_folded(out, code);
      out += U' ';
    } else {
      append_folded(out, code);
    }
  }
  return out;
}

std::vector<std::string> read_lines(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument(fmt::format("Tokenizer: cannot read '{}'; pass the path of vocab.txt", path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    lines.push_back(line);
  }
  return lines;
}

}  // namespace

std::vector<std::string> basic_tokens(std::string_view text) {
  std::vector<std::string> tokens;
  std::u32string word;
  const auto end_word = [&] {
    if (!word.empty()) tokens.push_back(encode_utf8(word));
    word.clear();
  };
  for (const char32_t code : clean(text)) {
    const bool alone = contains(kPunctuation, code);
    if (alone || code == U' ') end_word();
    if (code != U' ') word += code;
    if (alone) end_word();
  }
  end_word();
  return tokens;
}

Tokenizer::Tokenizer(const std::vector<std::string>& vocabulary) {
  for (const std::string& piece : vocabulary) {
    const auto id = static_cast<int64_t>(ids_.size());
    if (!ids_.emplace(piece, id).second) {
      throw std::invalid_argument(
          fmt::format("Tokenizer: '{}' occurs twice in the vocabulary, as id {} and {}", piece, ids_.at(piece), id));
    }
  }
  pad_ = special("[PAD]");
  unk_ = special("[UNK]");
  cls_ = special("[CLS]");
  sep_ = special("[SEP]");
}

Tokenizer Tokenizer::from_file(const std::string& path) { return Tokenizer(read_lines(path)); }

int64_t Tokenizer::special(const char* piece) const {
  const auto found = ids_.find(std::string_view(piece));
  if (found != ids_.end()) return found->second;
  throw std::invalid_argument(fmt::format(
      "Tokenizer: the vocabulary of {} pieces has no {}; it must be BERT's vocab.txt, with one piece per line",
      ids_.size(), piece));
}

void Tokenizer::append_pieces(const std::string& word, std::vector<int64_t>& out) const {
  const auto is_inside = [&](std::size_t at) {
    return at < word.size() && (static_cast<uint8_t>(word[at]) & 0xC0U) == 0x80U;
  };
  if (decode_utf8(word).size() > kMaxWordLength) return out.push_back(unk_);
  const std::size_t size_before = out.size();
  std::string piece;
  for (std::size_t start = 0, end = 0; start < word.size(); start = end) {
    const char* const prefix = start == 0 ? "" : "##";
    auto found = ids_.end();
    for (end = word.size(); end > start; --end) {
      if (is_inside(end)) continue;
      piece.assign(prefix).append(word, start, end - start);
      found = ids_.find(piece);
      if (found != ids_.end()) break;
    }
    if (found == ids_.end()) {
      out.resize(size_before);
      return out.push_back(unk_);
    }
    out.push_back(found->second);
  }
}

std::vector<int64_t> Tokenizer::encode(std::string_view text, int64_t max_length) const {
  if (max_length < 2) {
    throw std::invalid_argument(
        fmt::format("Tokenizer: max_length {} has no room for [CLS] and [SEP]; pass 2 or more", max_length));
  }
  std::vector<int64_t> ids = {cls_};
  for (const std::string& word : basic_tokens(text)) append_pieces(word, ids);
  ids.resize(std::min(ids.size(), static_cast<std::size_t>(max_length - 1)));
  ids.push_back(sep_);
  return ids;
}

Batch Tokenizer::encode_batch(const std::vector<std::string>& sentences, int64_t max_length) const {
  std::vector<std::vector<int64_t>> rows;
  Batch batch;
  batch.sentences = static_cast<int64_t>(sentences.size());
  for (const std::string& sentence : sentences) {
    rows.push_back(encode(sentence, max_length));
    batch.length = std::max(batch.length, static_cast<int64_t>(rows.back().size()));
  }
  for (const std::vector<int64_t>& row : rows) {
    const std::size_t padding = static_cast<std::size_t>(batch.length) - row.size();
    batch.ids.insert(batch.ids.end(), row.begin(), row.end());
    batch.ids.insert(batch.ids.end(), padding, pad_);
    batch.mask.insert(batch.mask.end(), row.size(), 1);
    batch.mask.insert(batch.mask.end(), padding, 0);
  }
  return batch;
}

}  // namespace embed
