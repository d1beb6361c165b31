#include "tessera/dtensor/io/weight_slots.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/name_pattern.h"
#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

// Describes one way to make a tensor of the module: a source without wildcards, and its text where a rule gave it.
struct Candidate {
  WeightSource source;
  std::string rule;
};

// Collects everything that does not fit, so that one message lists it all.
struct Misfits {
  std::vector<std::string> not_given;  // no rule is for these tensors
  std::vector<std::string> idle_rules;
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> shapes;
  std::vector<std::string> dtypes;
  std::vector<std::string> expanded;  // some of their elements are one

  bool empty() const {
    return not_given.empty() && idle_rules.empty() && missing.empty() && unexpected.empty() && shapes.empty() &&
           dtypes.empty() && expanded.empty();
  }
};

bool may_be_missing(const ModuleTensor& item, const LoadOptions& options) {
  return std::ranges::any_of(options.allow_missing, [&](const std::string& pattern) {
    return std::ranges::any_of(item.names, [&](const std::string& name) { return matches(pattern, name); });
  });
}

// Plans the tensor, or returns nullopt and says why it does not fit.
std::optional<WeightPlan> plan_of(const ModuleTensor& item, const Candidate& candidate, const Checkpoint& checkpoint,
                                  Misfits& misfits) {
  const std::string& name = item.names.front();
  const std::string by = candidate.rule.empty() ? "in the file" : "by the rule " + candidate.rule;
  try {
    WeightPlan plan = plan_weight(candidate.source, [&](const std::string& file_name) -> const std::vector<int64_t>& {
      return checkpoint.find(file_name)->shape;
    });
    if (item.tensor.sizes() == at::IntArrayRef(plan.shape)) return plan;
    misfits.shapes.push_back(fmt::format("{} is [{}] {} and [{}] in the module", in_quotes(name),
                                         fmt::join(plan.shape, ", "), by, fmt::join(item.tensor.sizes(), ", ")));
  } catch (const std::invalid_argument& error) {
    misfits.shapes.push_back(fmt::format("{} is [{}] in the module, and {} it cannot be made: {}", in_quotes(name),
                                         fmt::join(item.tensor.sizes(), ", "), by, error.what()));
  }
  return std::nullopt;
}

void check_dtypes(const ModuleTensor& item, const Candidate& candidate, const Checkpoint& checkpoint,
                  const LoadOptions& options, Misfits& misfits) {
  for (const std::string& file_name : candidate.source.file_names()) {
    const at::ScalarType dtype = checkpoint.find(file_name)->dtype;
    if (dtype == item.tensor.scalar_type() || options.convert_dtype) continue;
    misfits.dtypes.push_back(fmt::format("{} is {} in the file and {} in the module", in_quotes(item.names.front()),
                                         c10::toString(dtype), c10::toString(item.tensor.scalar_type())));
    return;
  }
}

int64_t element_bytes(const WeightBlock& block, const Checkpoint& checkpoint) {
  return static_cast<int64_t>(c10::elementSize(checkpoint.find(block.file_name)->dtype));
}

int64_t elements(const WeightBlock& block) {
  return std::accumulate(block.box.sizes.begin(), block.box.sizes.end(), int64_t{1}, std::multiplies<>());
}

WeightSlot make_slot(const ModuleTensor& item, const WeightPlan& plan, const Checkpoint& checkpoint) {
  WeightSlot slot = {.target = item.tensor, .plan = part_of_plan(plan, held_box(item.tensor, item.names.front()))};
  for (const WeightBlock& block : slot.plan.blocks) slot.bytes += elements(block) * element_bytes(block, checkpoint);
  return slot;
}

// Without `has_options` the text names no options, since the user cannot give any.
[[noreturn]] void throw_misfits(const Misfits& misfits, const std::string& path, bool has_options, const char* op) {
  const auto hint = [has_options](const char* text) { return has_options ? text : ""; };
  std::string text = fmt::format("{}: '{}' does not fit the module, which was not changed.", op, path);
  if (!misfits.not_given.empty()) {
    text +=
        fmt::format(" No rule is for: {} (add one, or name them in `allow_missing`).", list_names(misfits.not_given));
  }
  if (!misfits.idle_rules.empty()) {
    text +=
        fmt::format(" No tensor of the module has the name of these rules: {}.", list_texts(misfits.idle_rules, "; "));
  }
  if (!misfits.missing.empty()) {
    text += fmt::format(" Missing in the file: {}{}.", list_texts(misfits.missing, ", "),
                        hint(" (rename them with `rename` or `rules`, or name the module's in `allow_missing`)"));
  }
  if (!misfits.unexpected.empty()) {
    text += fmt::format(" Not in the module: {}{}.", list_texts(misfits.unexpected, ", "),
                        hint(" (set `allow_unexpected` to ignore them)"));
  }
  if (!misfits.shapes.empty()) text += fmt::format(" Of another shape: {}.", list_texts(misfits.shapes, "; "));
  if (!misfits.dtypes.empty()) {
    text += fmt::format(" Of another dtype: {}{}.", list_texts(misfits.dtypes, "; "),
                        hint(" (set `convert_dtype` to convert)"));
  }
  if (!misfits.expanded.empty()) {
    text += fmt::format(" Expanded in the module, so that one number in memory is several elements: {} (clone() them).",
                        list_texts(misfits.expanded, "; "));
  }
  if (!has_options) {
    text +=
        " Make the module as it was when this was saved, or load the weights alone by load_weights, whose options "
        "rename, convert and leave out tensors.";
  }
  throw std::invalid_argument(text);
}

// Returns the ways in which `item` may be made, in the order in which they count; none if the user's rename excludes
// it, or no rule is for it. Marks the rules that are for it.
std::vector<Candidate> candidates_of(const ModuleTensor& item, const LoadOptions& options, std::vector<bool>& used) {
  std::vector<Candidate> candidates;
  for (const std::string& name : item.names) {
    if (options.rules.rules.empty()) {
      const std::string in_file = options.rename ? options.rename(name) : name;
      if (!in_file.empty()) candidates.push_back({from_file(in_file), ""});
    }
    for (std::size_t i = 0; i < options.rules.rules.size(); ++i) {
      const WeightRule& rule = options.rules.rules[i];
      const auto captured = captures(rule.module_name, name);
      if (!captured) continue;
      used[i] = true;
      candidates.push_back({rule.source.filled(*captured), to_string(rule)});
    }
  }
  return candidates;
}

void check_rules(const LoadOptions& options) {
  if (options.rename && !options.rules.rules.empty()) {
    throw std::invalid_argument("load_weights: `rename` and `rules` are given; write the names as rules");
  }
  for (const WeightRule& rule : options.rules.rules) {
    for (const std::string& name : rule.source.file_names()) {
      if (wildcards(name) <= wildcards(rule.module_name)) continue;
      throw std::invalid_argument(fmt::format(
          "load_weights: rule {}: {} has more wildcards than the module's name; each stands for what one of these does",
          to_string(rule), in_quotes(name)));
    }
  }
}

// Says whether the entry is one that other engines' layers save beside their tensors.
bool is_extra_state(std::string_view name) { return name == "_extra_state" || name.ends_with("._extra_state"); }

bool has_all(const Checkpoint& checkpoint, const Candidate& candidate) {
  return std::ranges::all_of(candidate.source.file_names(),
                             [&](const std::string& name) { return checkpoint.find(name) != nullptr; });
}

// Counts what of the file the module asks for. A block that is asked for twice counts once, so that it does not hide
// another that is left out; blocks that overlap in part count as if they did not.
class Wanted {
 public:
  void add_names(const Candidate& candidate) {
    for (std::string& name : candidate.source.file_names()) names_.insert(std::move(name));
  }
  void add(const WeightBlock& block) {
    if (blocks_[block.file_name].emplace(block.offset, loops_in_file(block)).second)
      elements_[block.file_name] += elements(block);
  }

  bool has_name(const std::string& name) const { return names_.contains(name); }
  // Returns how many elements of the file's tensor are asked for; nullopt: none of its blocks is.
  std::optional<int64_t> elements_of(const std::string& name) const {
    const auto found = elements_.find(name);
    return found == elements_.end() ? std::nullopt : std::make_optional(found->second);
  }

 private:
  std::set<std::string> names_;
  std::map<std::string, std::set<std::pair<int64_t, std::vector<Loop>>>> blocks_;  // offsets, and loops_in_file()
  std::map<std::string, int64_t> elements_;
};

// Names what a tensor lacks: the first of its files' tensors that is not there, by the first of its candidates.
void add_missing(const ModuleTensor& item, const std::vector<Candidate>& candidates, const Checkpoint& checkpoint,
                 Misfits& misfits) {
  if (candidates.empty()) return misfits.not_given.push_back(item.names.front());
  const Candidate& first = candidates.front();
  const std::vector<std::string> names = first.source.file_names();
  const auto missing =
      std::ranges::find_if(names, [&](const std::string& name) { return checkpoint.find(name) == nullptr; });
  misfits.missing.push_back(in_quotes(*missing) + (first.rule.empty() ? "" : " for " + in_quotes(item.names.front())));
}

void match_tensor(const ModuleTensor& item, const std::vector<Candidate>& candidates, const Checkpoint& checkpoint,
                  const LoadOptions& options, std::vector<WeightSlot>& slots, Wanted& wanted, Misfits& misfits) {
  for (const Candidate& each : candidates) wanted.add_names(each);
  const auto found = std::ranges::find_if(candidates, [&](const Candidate& each) { return has_all(checkpoint, each); });
  if (found == candidates.end()) {
    const bool is_excluded = candidates.empty() && options.rules.rules.empty();
    if (!is_excluded && !may_be_missing(item, options)) add_missing(item, candidates, checkpoint, misfits);
    return;
  }
  const std::optional<WeightPlan> plan = plan_of(item, *found, checkpoint, misfits);
  check_dtypes(item, *found, checkpoint, options, misfits);
  const at::Tensor& here = is_dtensor(item.tensor) ? detail::meta(item.tensor).local() : item.tensor;
  if (at::has_internal_overlap(here) == at::MemOverlap::Yes) misfits.expanded.push_back(in_quotes(item.names.front()));
  if (!plan) return;
  for (const WeightBlock& block : plan->blocks) wanted.add(block);
  if (is_held(item.tensor)) slots.push_back(make_slot(item, *plan, checkpoint));
}

// Lists the tensors of the file that the module does not need, and those of which rules leave a part.
void check_unexpected(const Checkpoint& checkpoint, const LoadOptions& options, const Wanted& wanted,
                      Misfits& misfits) {
  if (options.allow_unexpected) return;
  for (const auto& [name, entry] : checkpoint.tensors()) {
    const std::string& file_name = name;
    if (is_extra_state(file_name) || std::ranges::any_of(options.rules.ignored, [&](const std::string& pattern) {
          return matches(pattern, file_name);
        })) {
      continue;
    }
    if (!wanted.has_name(file_name)) misfits.unexpected.push_back(in_quotes(file_name));
    const std::optional<int64_t> used = wanted.elements_of(file_name);
    const int64_t all = entry->nbytes() / static_cast<int64_t>(c10::elementSize(entry->dtype));
    if (!used || *used >= all) continue;
    misfits.unexpected.push_back(fmt::format("{} of the {} elements of {}", all - *used, all, in_quotes(file_name)));
  }
}

at::Tensor read_block(const WeightBlock& block, const Checkpoint& checkpoint, c10::Device device = at::kCPU) {
  return arranged(block, checkpoint.read_runs(block.file_name, runs_of(block), device));
}

// Returns where a box is read to. What waits until all ranks have read waits in the host's memory. A box that is to be
// arranged, converted, or freed of values that the rank does not hold is read there too, so that a GPU has memory for
// one piece beside the module's and no more.
c10::Device device_of_box(const WeightSlot& slot, const Checkpoint& checkpoint, const LoadOptions& options) {
  const at::Tensor& target = slot.target;
  const std::vector<WeightBlock>& blocks = slot.plan.blocks;
  const bool as_it_is = blocks.size() == 1 && in_file_order(blocks.front()) &&
                        checkpoint.find(blocks.front().file_name)->dtype == target.scalar_type() &&
                        !box_has_gaps(target);
  return options.in_place && as_it_is ? target.device() : c10::Device(at::kCPU);
}

// Reads the box of a tensor that this rank fills. A piece of several blocks gets the module's dtype, since the blocks
// may be of different ones.
at::Tensor read_box(const WeightSlot& slot, const Checkpoint& checkpoint, c10::Device device) {
  const std::vector<WeightBlock>& blocks = slot.plan.blocks;
  if (blocks.size() == 1) return read_block(blocks.front(), checkpoint, device);
  at::Tensor box = at::empty(slot.plan.shape, at::TensorOptions().dtype(slot.target.scalar_type()));
  for (const WeightBlock& block : blocks) {
    at::Tensor part = box;
    for (std::size_t d = 0; d < block.box.sizes.size(); ++d) {
      part = part.narrow(static_cast<int64_t>(d), block.box.offsets[d], block.box.sizes[d]);
    }
    part.copy_(read_block(block, checkpoint));
  }
  return box;
}

}  // namespace

std::vector<WeightSlot> match_weights(const std::vector<ModuleTensor>& tensors, const Checkpoint& checkpoint,
                                      const std::string& path, const LoadOptions* given, const char* op) {
  const LoadOptions none;
  const LoadOptions& options = given != nullptr ? *given : none;
  check_rules(options);
  std::vector<WeightSlot> slots;
  Misfits misfits;
  Wanted wanted;
  std::vector<bool> used(options.rules.rules.size());
  for (const ModuleTensor& item : tensors) {
    match_tensor(item, candidates_of(item, options, used), checkpoint, options, slots, wanted, misfits);
  }
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) misfits.idle_rules.push_back(to_string(options.rules.rules[i]));
  }
  check_unexpected(checkpoint, options, wanted, misfits);
  if (!misfits.empty()) throw_misfits(misfits, path, given != nullptr, op);
  // Tensors are read in the order of their data.
  std::ranges::sort(slots, {}, [&](const WeightSlot& slot) {
    const auto& blocks = slot.plan.blocks;
    return blocks.empty() ? std::pair<std::size_t, int64_t>() : checkpoint.position_of(blocks.front().file_name);
  });
  return slots;
}

void read_weights(std::vector<WeightSlot>& slots, const Checkpoint& checkpoint, const LoadOptions& options) {
  int64_t total = 0;
  for (const WeightSlot& slot : slots) total += slot.bytes;
  int64_t done = 0;
  for (WeightSlot& slot : slots) {
    slot.piece = held_part(slot.target, read_box(slot, checkpoint, device_of_box(slot, checkpoint, options)));
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
