#include "tessera/ops/rules/rule.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

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
//   - rules_ is read and written with mutex_ held.
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
  }

 private:
  std::mutex mutex_;
  std::map<std::string, RuleFn, std::less<>> rules_;
};

Registry& registry() {
  static Registry instance;
  return instance;
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
        if (f != '-' && factors.find(f) == Labels::npos) factors += f;
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

RuleFn find_rule(std::string_view op_name) { return registry().find(rule_key(std::string(op_name))); }

void register_rule(const std::string& op_name, RuleFn rule) {
  if (rule == nullptr) throw std::invalid_argument(fmt::format("register_rule: the rule of {} is null", op_name));
  if (op_name.find("::") == std::string::npos || op_name.find('.') != std::string::npos) {
    throw std::invalid_argument(fmt::format(
        "register_rule: \"{}\" is no operator's namespace and name, as in \"mylib::scale\"; overloads have one rule",
        op_name));
  }
  registry().add(rule_key(op_name), rule);
}

}  // namespace tessera::rules
