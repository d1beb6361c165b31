#include "tessera/ops/rules/rule.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

namespace tessera::rules {
namespace {

// Returns Shard in the dimension that has factor `f` among a tensor's labels, or `otherwise` if none has.
Placement placement_of(const Labels& labels, char f, Placement otherwise) {
  const auto at = labels.find(f);
  return at == Labels::npos ? otherwise : Shard(static_cast<int64_t>(at));
}

// Invariants:
//   - Each key has one rule; rules are replaced, never removed.
//   - rules_ and replaced_ are read and written with mutex_ held.
class Registry {
 public:
  Registry() {
    for (const auto table : {pointwise_rules(), view_rules(), join_rules(), indexing_rules(), reduction_rules(),
                             matmul_rules(), nn_rules(), convolution_rules(), pooling_rules(), norm_rules(),
                             factory_rules(), random_rules(), batched_rules()}) {
      for (const RuleEntry& entry : table) {
        if (!rules_.emplace(entry.name, entry.rule).second) {
          throw std::logic_error(fmt::format("two sharding rules for {}", entry.name));
        }
      }
    }
  }

  RuleFn find(std::string_view key) {
    const std::lock_guard lock(mutex_);
    const auto it = rules_.find(key);
    return it == rules_.end() ? nullptr : it->second;
  }

  void add(const std::string& key, RuleFn rule) {
    const std::lock_guard lock(mutex_);
    rules_.insert_or_assign(key, rule);
    if (key.find("::") != std::string::npos) return;
    replaced_.insert(key);
    any_replaced = true;
  }

  bool is_replaced(std::string_view key) {
    const std::lock_guard lock(mutex_);
    return replaced_.contains(key);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, RuleFn, std::less<>> rules_;
  std::set<std::string, std::less<>> replaced_;  // the keys of LibTorch's operators among those that were added
};

Registry& registry() {
  static Registry instance;
  return instance;
}

constexpr std::array kComposite = {c10::DispatchKey::CompositeImplicitAutograd,
                                   c10::DispatchKey::CompositeExplicitAutograd,
                                   c10::DispatchKey::CompositeExplicitAutogradNonFunctional};

// Refuses an operator for all of whose overloads LibTorch's dispatcher finds a kernel for all devices before it asks
// for ours.
void check_is_dispatched(const std::string& op_name) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  constexpr c10::DispatchKey kOurs = c10::DispatchKey::PrivateUse3;
  const auto product = dispatcher.findOp({"aten::mm", ""});
  if (!product || !product->hasKernelForDispatchKey(kOurs)) return;  // a program of rules alone dispatches nothing
  std::optional<c10::DispatchKey> found;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = name.name == op_name ? dispatcher.findOp(name) : std::nullopt;
    if (!op) continue;
    const bool decomposes = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                            !op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
    if (!decomposes && op->hasKernelForDispatchKey(kOurs)) return;
    const auto composite =
        std::ranges::find_if(kComposite, [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); });
    if (composite == kComposite.end()) return;
    found = *composite;
  }
  if (!found) return;
  throw std::invalid_argument(fmt::format(
      "register_rule: {} has a kernel for all devices ({}), which LibTorch runs on DTensors without asking for a rule; "
      "give an operator of your own by m.def(schema) alone, and its kernel to TORCH_LIBRARY_IMPL(..., CPU, m), and "
      "CUDA",
      op_name, c10::toString(*found)));
}

}  // namespace

std::size_t OpCall::arg_index(std::string_view name) const {
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return i;
  }
  std::string names;
  for (const c10::Argument& argument : arguments) names += (names.empty() ? "" : ", ") + argument.name();
  throw std::logic_error(fmt::format("{} has no argument {}; it has {}", schema.name(), name, names));
}

bool OpCall::has_arg(std::string_view name) const {
  const auto& arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::Argument& a) { return a.name() == name; });
}

std::vector<int64_t> OpCall::dims(std::string_view name, int64_t ndim) const {
  const c10::IValue& value = arg(name);
  std::vector<int64_t> out;
  if (value.isInt()) out = {value.toInt()};
  if (value.isIntList()) out = value.toIntVector();
  for (int64_t& d : out) {
    if (d < 0) d += ndim;
  }
  return out;
}

int64_t OpCall::dim(std::string_view name, int64_t ndim) const {
  const auto all = dims(name, ndim);
  return all.empty() ? 0 : all.front();
}

std::vector<Strategy> shard_factors(const std::vector<Labels>& inputs, const std::vector<Labels>& outputs, ReduceOp op,
                                    std::string_view unsummable) {
  Labels factors;
  for (const auto* side : {&inputs, &outputs}) {
    for (const Labels& labels : *side) {
      for (const char f : labels) {
        if (f == '-') continue;
        if (std::ranges::count(labels, f) > 1) {
          throw std::logic_error(fmt::format(
              "shard_factors: the letter {} stands twice in \"{}\", but a cut of one dimension does not cut the other; "
              "write '-' for dimensions that are not cut",
              f, labels));
        }
        if (factors.find(f) == Labels::npos) factors += f;
      }
    }
  }
  std::vector<Strategy> out;
  for (const char f : factors) {
    Strategy strategy;
    for (const Labels& labels : inputs) strategy.inputs.push_back(placement_of(labels, f, Replicate()));
    for (const Labels& labels : outputs) strategy.outputs.push_back(placement_of(labels, f, Partial(op)));
    const bool sums =
        std::any_of(strategy.outputs.begin(), strategy.outputs.end(), [](auto p) { return p.is_partial(); });
    if (!sums || unsummable.find(f) == std::string_view::npos) out.push_back(std::move(strategy));
  }
  return out;
}

Strategy pass_partial(std::size_t num_inputs, std::size_t num_outputs, const std::vector<std::size_t>& group,
                      ReduceOp op) {
  Strategy strategy{.inputs = Placements(num_inputs, Replicate()), .outputs = Placements(num_outputs, Partial(op))};
  for (const std::size_t i : group) strategy.inputs.at(i) = Partial(op);
  return strategy;
}

void add_linear(OpRule& rule, std::size_t num_inputs, std::size_t num_outputs,
                const std::vector<std::vector<std::size_t>>& groups) {
  for (const auto& group : groups) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      rule.strategies.push_back(pass_partial(num_inputs, num_outputs, group, op));
    }
  }
}

void add_movement(OpRule& rule, std::size_t num_inputs, std::size_t num_outputs) {
  for (const ReduceOp op : kPlainReductions) rule.strategies.push_back(pass_partial(num_inputs, num_outputs, {0}, op));
}

Labels letters(std::size_t count, char first) {
  Labels out;
  for (std::size_t i = 0; i < count; ++i) out += static_cast<char>(first + static_cast<char>(i));
  return out;
}

std::string rule_key(const std::string& op_name) {
  std::string key = op_name.rfind("aten::", 0) == 0 ? op_name.substr(6) : op_name;
  if (key.size() > 1 && key.back() == '_' && key[key.size() - 2] != '_') key.pop_back();
  return key;
}

void check_counts(const Strategy& strategy, std::size_t inputs, std::size_t outputs, std::string_view rule) {
  if (strategy.inputs.size() == inputs && strategy.outputs.size() == outputs) return;
  throw std::logic_error(
      fmt::format("{} has a strategy of {} inputs and {} outputs; the call has {} and {} (an absent tensor counts, "
                  "lists are flattened)",
                  rule, strategy.inputs.size(), strategy.outputs.size(), inputs, outputs));
}

void check_strategies(const OpRule& rule, const std::vector<TensorInfo>& inputs, const std::vector<TensorInfo>& outputs,
                      std::string_view op) {
  const auto check_cuts = [&](const std::vector<Placement>& placements, const std::vector<TensorInfo>& tensors,
                              const char* what) {
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      const Placement& p = placements[j];
      if (!tensors[j].defined || !p.is_shard() || (p.tensor_dim() >= 0 && p.tensor_dim() < tensors[j].ndim())) continue;
      throw std::logic_error(fmt::format(
          "{}: its sharding rule has a strategy with {} for {} {}, which has {} dimensions; label each dimension of "
          "each tensor once",
          op, to_string(p), what, j, tensors[j].ndim()));
    }
  };
  for (const Strategy& strategy : rule.strategies) {
    check_counts(strategy, inputs.size(), outputs.size(), fmt::format("{}: its sharding rule", op));
    check_cuts(strategy.inputs, inputs, "input");
    check_cuts(strategy.outputs, outputs, "output");
  }
}

bool is_replaced(std::string_view key) { return registry().is_replaced(key); }

RuleFn find_rule(std::string_view op_name) { return registry().find(rule_key(std::string(op_name))); }

void register_rule(const std::string& op_name, RuleFn rule) {
  if (rule == nullptr) throw std::invalid_argument(fmt::format("register_rule: the rule of {} is null", op_name));
  if (op_name.find("::") == std::string::npos || op_name.find('.') != std::string::npos) {
    throw std::invalid_argument(fmt::format(
        "register_rule: \"{}\" is no operator's namespace and name, as in \"mylib::scale\"; overloads have one rule",
        op_name));
  }
  check_is_dispatched(op_name);
  registry().add(rule_key(op_name), rule);
}

}  // namespace tessera::rules
