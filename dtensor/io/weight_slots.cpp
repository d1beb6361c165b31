#include "tessera/dtensor/io/weight_slots.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

// Collects everything that does not fit, so that one message lists it all.
struct Misfits {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> shapes;
  std::vector<std::string> dtypes;

  bool empty() const { return missing.empty() && unexpected.empty() && shapes.empty() && dtypes.empty(); }
};

// Matches a pattern: `*` stands for any characters, `?` for one.
bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() == '*') {
    return matches(pattern.substr(1), name) || (!name.empty() && matches(pattern, name.substr(1)));
  }
  return !name.empty() && (pattern.front() == '?' || pattern.front() == name.front()) &&
         matches(pattern.substr(1), name.substr(1));
}

bool may_be_missing(const ModuleTensor& item, const LoadOptions& options) {
  return std::ranges::any_of(options.allow_missing, [&](const std::string& pattern) {
    return std::ranges::any_of(item.names, [&](const std::string& name) { return matches(pattern, name); });
  });
}

void check_fit(const ModuleTensor& item, const TensorEntry& entry, const LoadOptions& options, Misfits& misfits) {
  const std::string& name = item.names.front();
  if (item.tensor.sizes() != at::IntArrayRef(entry.shape)) {
    misfits.shapes.push_back(fmt::format("{} is [{}] in the file and [{}] in the module", in_quotes(name),
                                         fmt::join(entry.shape, ", "), fmt::join(item.tensor.sizes(), ", ")));
  }
  if (item.tensor.scalar_type() != entry.dtype && !options.convert_dtype) {
    misfits.dtypes.push_back(fmt::format("{} is {} in the file and {} in the module", in_quotes(name),
                                         c10::toString(entry.dtype), c10::toString(item.tensor.scalar_type())));
  }
}

WeightSlot make_slot(const ModuleTensor& item, const TensorEntry& entry) {
  WeightSlot slot = {.target = item.tensor, .file_name = entry.name, .box = held_box(item.tensor, item.names.front())};
  slot.bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  for (const int64_t size : slot.box.sizes) slot.bytes *= size;
  return slot;
}

std::string joined(const std::vector<std::string>& lines) {
  constexpr std::size_t kShown = 10;
  const std::vector<std::string> first(lines.begin(),
                                       lines.begin() + static_cast<std::ptrdiff_t>(std::min(lines.size(), kShown)));
  const std::string more = lines.size() > kShown ? fmt::format(" and {} more", lines.size() - kShown) : "";
  return fmt::format("{}{}", fmt::join(first, "; "), more);
}

[[noreturn]] void throw_misfits(const Misfits& misfits, const std::string& path, const char* op) {
  std::string text = fmt::format("{}: '{}' does not fit the module, which was not changed.", op, path);
  if (!misfits.missing.empty()) {
    text += fmt::format(
        " Missing in the file: {} (rename them with `rename` of load_weights, or name them in `allow_missing`).",
        list_names(misfits.missing));
  }
  if (!misfits.unexpected.empty()) {
    text += fmt::format(" Not in the module: {} (set `allow_unexpected` of load_weights to ignore them).",
                        list_names(misfits.unexpected));
  }
  if (!misfits.shapes.empty()) text += fmt::format(" Of another shape: {}.", joined(misfits.shapes));
  if (!misfits.dtypes.empty()) {
    text +=
        fmt::format(" Of another dtype: {} (set `convert_dtype` of load_weights to convert).", joined(misfits.dtypes));
  }
  throw std::invalid_argument(text);
}

// Returns the names that `item` may have in the file; none if the user's rename excludes it.
std::vector<std::string> file_names(const ModuleTensor& item, const LoadOptions& options) {
  if (!options.rename) return item.names;
  std::vector<std::string> names;
  for (const std::string& name : item.names) {
    std::string renamed = options.rename(name);
    if (!renamed.empty()) names.push_back(std::move(renamed));
  }
  return names;
}

// Says whether the entry is one that other engines' layers save beside their tensors.
bool is_extra_state(std::string_view name) { return name == "_extra_state" || name.ends_with("._extra_state"); }

}  // namespace

std::vector<WeightSlot> match_weights(const std::vector<ModuleTensor>& tensors, const Checkpoint& checkpoint,
                                      const std::string& path, const LoadOptions& options, const char* op) {
  std::vector<WeightSlot> slots;
  Misfits misfits;
  std::set<std::string> wanted;
  for (const ModuleTensor& item : tensors) {
    const std::vector<std::string> names = file_names(item, options);
    wanted.insert(names.begin(), names.end());
    const auto found =
        std::ranges::find_if(names, [&](const std::string& name) { return checkpoint.find(name) != nullptr; });
    if (found != names.end()) {
      const TensorEntry& entry = *checkpoint.find(*found);
      check_fit(item, entry, options, misfits);
      if (is_held(item.tensor)) slots.push_back(make_slot(item, entry));
    } else if (!names.empty() && !may_be_missing(item, options)) {
      misfits.missing.push_back(names.front());
    }
  }
  for (const auto& [name, entry] : checkpoint.tensors()) {
    if (!options.allow_unexpected && !wanted.contains(name) && !is_extra_state(name))
      misfits.unexpected.push_back(name);
  }
  if (!misfits.empty()) throw_misfits(misfits, path, op);
  std::ranges::sort(slots, {}, [&](const WeightSlot& slot) { return checkpoint.position_of(slot.file_name); });
  return slots;
}

void read_weights(std::vector<WeightSlot>& slots, const Checkpoint& checkpoint, const LoadOptions& options) {
  int64_t total = 0;
  for (const WeightSlot& slot : slots) total += slot.bytes;
  int64_t done = 0;
  for (WeightSlot& slot : slots) {
    slot.piece = held_part(slot.target, checkpoint.read_box(slot.file_name, slot.box));
    if (options.in_place) {
      write_piece(slot.target, slot.piece);
      slot.piece.reset();
    }
    done += slot.bytes;
    if (options.progress) options.progress(done, total);
  }
}

void write_weights(std::vector<WeightSlot>& slots) {
  for (WeightSlot& slot : slots) {
    write_piece(slot.target, slot.piece);
    slot.piece.reset();
  }
}

}  // namespace tessera
