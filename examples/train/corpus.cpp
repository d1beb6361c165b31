#include "tessera/examples/train/corpus.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <c10/util/hash.h>
#include <fmt/format.h>

namespace train {
namespace {

namespace fs = std::filesystem;

std::string sha1(const std::string& text) { return c10::sha1(text).str(); }

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(file ? static_cast<std::size_t>(fs::file_size(path)) : 0, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size()))) {
    throw std::runtime_error(fmt::format("cannot read '{}'", path.string()));
  }
  return text;
}

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with("."); }

// Adds the files below `folder`, as paths below `root`. Links are followed, but for one to a folder that the link is
// in.
void list_files(const fs::path& root, const fs::path& folder, std::vector<std::string>& out) {
  constexpr auto kFollow = fs::directory_options::follow_directory_symlink;
  std::vector<fs::path> above = {fs::canonical(folder)};  // the folders that the iterator is in
  for (auto it = fs::recursive_directory_iterator(folder, kFollow); it != fs::recursive_directory_iterator(); ++it) {
    if (is_hidden(it->path())) {
      it.disable_recursion_pending();
    } else if (it->is_directory()) {
      const fs::path real = fs::canonical(it->path());
      above.resize(static_cast<std::size_t>(it.depth()) + 1);
      if (std::ranges::count(above, real) > 0) it.disable_recursion_pending();
      above.push_back(real);
    } else if (it->is_regular_file()) {
      out.push_back(it->path().lexically_relative(root).generic_string());
    }
  }
}

std::vector<std::string> sorted_files(const CorpusFolder& folder) {
  if (!fs::is_directory(folder.path)) {
    throw std::invalid_argument(fmt::format("--data: '{}' is no folder; name one that has files of text", folder.path));
  }
  const fs::path root = folder.path;
  std::vector<std::string> out;
  if (folder.parts.empty()) list_files(root, root, out);
  for (const std::string& part : folder.parts) {
    if (fs::is_directory(root / part)) list_files(root, root / part, out);
  }
  std::sort(out.begin(), out.end());
  return out;
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

std::string name_of(const std::string& path) {
  const std::string file = path.substr(path.rfind('/') + 1);
  return file.substr(0, file.find('.'));
}

// Finds families of near-duplicates; see read_corpus.
class Repetitions {
 public:
  // Says whether `text` repeats what came before. If it does not, later texts are compared with it too.
  bool repeats(const std::string& text) {
    std::vector<std::size_t> lines;
    for (const std::string& shape : shapes_of_lines(text)) lines.push_back(std::hash<std::string>()(shape));
    const std::size_t run = std::min<std::size_t>(3, lines.size());
    std::vector<std::size_t> added;
    std::size_t runs = 0;
    for (std::size_t i = 0; run > 0 && i + run <= lines.size(); ++i, ++runs) {
      std::size_t hash = 0;
      for (std::size_t j = i; j < i + run; ++j) hash = c10::hash_combine(hash, lines[j]);
      if (seen_.insert(hash).second) added.push_back(hash);
    }
    const bool is_repetition = 2 * (runs - added.size()) > runs;
    if (is_repetition) {
      for (const std::size_t hash : added) seen_.erase(hash);
    }
    return is_repetition;
  }

 private:
  std::unordered_set<std::size_t> seen_;
};

// Returns the stems that are held out.
std::set<std::string> held_out_of(const std::set<std::string>& stems) {
  if (stems.size() < 2) {
    throw std::invalid_argument("--data: fewer than two files of text differ in their stems; one is to be held out");
  }
  std::vector<std::pair<std::string, std::string>> by_hash;
  by_hash.reserve(stems.size());
  for (const std::string& stem : stems) by_hash.emplace_back(sha1(stem), stem);
  std::sort(by_hash.begin(), by_hash.end());
  std::set<std::string> out;
  for (std::size_t i = 0; i < std::max<std::size_t>(1, by_hash.size() / 32); ++i) out.insert(by_hash[i].second);
  return out;
}

std::string hash_of(const Corpus& corpus) {
  std::string text;
  for (const ManifestLine& line : corpus.manifest) {
    text += fmt::format("{}\t{}\t{}\n", line.path, line.bytes, static_cast<int>(line.use));
  }
  return sha1(text + sha1(corpus.training) + sha1(corpus.held_out));
}

}  // namespace

CorpusFolder libtorch_headers() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&c10::GetDefaultCPUAllocator), &info) == 0) {
    throw std::runtime_error("LibTorch's library is not found; name a folder of text by --data");
  }
  const fs::path library = fs::canonical(info.dli_fname);
  return {.path = (library.parent_path().parent_path() / "include").string(),
          .parts = {"ATen", "c10", "caffe2", "torch"}};
}

std::vector<std::string> shapes_of_lines(const std::string& text) {
  std::vector<std::string> out;
  std::string shape;
  bool in_word = false;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || text[i] == '\n') {
      if (!shape.empty()) out.push_back(shape);
      shape.clear();
      in_word = false;
    } else if (is_word(text[i])) {
      if (!in_word) shape += 'a';
      in_word = true;
    } else {
      in_word = false;
      if (std::isspace(static_cast<unsigned char>(text[i])) == 0) shape += text[i];
    }
  }
  return out;
}

std::string stem_of(const std::string& path, const std::set<std::string>& names) {
  std::string name = name_of(path);
  for (std::size_t end = name.find('_', 1); end != std::string::npos; end = name.find('_', end + 1)) {
    if (names.contains(name.substr(0, end))) return name.substr(0, end);
  }
  return name;
}

Corpus read_corpus(const CorpusFolder& folder) {
  std::set<std::string> names, stems;
  const std::vector<std::string> files = sorted_files(folder);
  for (const std::string& path : files) names.insert(name_of(path));
  Corpus corpus;
  Repetitions repetitions;
  std::vector<std::pair<std::size_t, std::string>> kept;  // the place in the manifest, and the text
  for (const std::string& path : files) {
    std::string text = read_file(fs::path(folder.path) / path);
    if (text.empty() || text.find('\0') != std::string::npos) continue;
    const bool is_dropped = repetitions.repeats(text);
    corpus.manifest.push_back({.path = path,
                               .bytes = static_cast<int64_t>(text.size()),
                               .use = is_dropped ? Use::kRepetition : Use::kTraining});
    if (is_dropped) continue;
    stems.insert(stem_of(path, names));
    kept.emplace_back(corpus.manifest.size() - 1, std::move(text));
  }
  const std::set<std::string> held_out = held_out_of(stems);
  for (const auto& [line, text] : kept) {
    const bool is_held_out = held_out.contains(stem_of(corpus.manifest[line].path, names));
    if (is_held_out) corpus.manifest[line].use = Use::kHeldOut;
    (is_held_out ? corpus.held_out : corpus.training) += text;
  }
  corpus.hash = hash_of(corpus);
  return corpus;
}

std::string summary_of(const Corpus& corpus) {
  std::map<Use, int64_t> files, bytes;
  for (const ManifestLine& line : corpus.manifest) {
    ++files[line.use];
    bytes[line.use] += line.bytes;
  }
  return fmt::format(
      "data: {} files, {:.1f} MB to train on; {} files, {:.1f} MB held out; {} files, {:.1f} MB dropped as repetitions",
      files[Use::kTraining], 1e-6 * static_cast<double>(bytes[Use::kTraining]), files[Use::kHeldOut],
      1e-6 * static_cast<double>(bytes[Use::kHeldOut]), files[Use::kRepetition],
      1e-6 * static_cast<double>(bytes[Use::kRepetition]));
}

}  // namespace train
