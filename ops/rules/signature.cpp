#include "tessera/ops/rules/signature.h"

#include <algorithm>

#include "tessera/ops/rules/labels.h"

namespace tessera::rules {
namespace {

std::string_view trimmed(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> parts_of(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> out;
  for (;;) {
    const auto at = text.find(separator);
    out.push_back(trimmed(text.substr(0, at)));
    if (at == std::string_view::npos) return out;
    text.remove_prefix(at + separator.size());
  }
}

// Returns how many dimensions of a tensor of `ndim` dimensions the word's '*' or '~' stands for; nullopt if it does not
// fit.
std::optional<std::size_t> rest_of(std::string_view word, std::size_t ndim) {
  const bool open = word.find_first_of("*~") != std::string_view::npos;
  const std::size_t named = word.size() - (open ? 1 : 0);
  if (open ? ndim < named : ndim != named) return std::nullopt;
  return ndim - named;
}

bool inputs_fit(std::string_view text, const OpCall& call) {
  const auto words = parts_of(parts_of(text, "->").at(0), ",");
  if (words.size() != call.inputs.size()) return false;
  for (std::size_t j = 0; j < words.size(); ++j) {
    if (call.inputs[j].defined && !rest_of(words[j], call.inputs[j].sizes.size())) return false;
  }
  return true;
}

class Reader {
 public:
  Reader(std::string_view text, const OpCall& call) : call_(call) {
    const auto sides = parts_of(text, "->");
    inputs_ = parts_of(sides.at(0), ",");
    outputs_ = parts_of(sides.at(1), ",");
  }

  std::optional<Signature> read() {
    if (inputs_.size() != call_.inputs.size() || outputs_.size() != call_.outputs.size()) return std::nullopt;
    for (std::size_t j = 0; j < inputs_.size(); ++j) {
      if (!call_.inputs[j].defined) continue;
      const auto rest = rest_of(inputs_[j], call_.inputs[j].sizes.size());
      if (!rest) return std::nullopt;
      if (inputs_[j].starts_with('*') && !take_leading(call_.inputs[j].sizes, *rest)) return std::nullopt;
    }
    Signature out;
    for (std::size_t j = 0; j < inputs_.size(); ++j) out.inputs.push_back(labels(inputs_[j], call_.inputs[j]));
    for (std::size_t k = 0; k < outputs_.size(); ++k) {
      const TensorInfo& output = call_.outputs[k];
      if (output.defined) {
        const auto rest = rest_of(outputs_[k], output.sizes.size());
        if (!rest || (outputs_[k].starts_with('*') && *rest != leading_.size())) return std::nullopt;
      }
      out.outputs.push_back(labels(outputs_[k], output));
    }
    return out;
  }

 private:
  // Broadcasts the leading sizes of all inputs. Returns false if these do not broadcast with those before.
  bool take_leading(const std::vector<int64_t>& sizes, std::size_t count) {
    if (leading_.size() < count) leading_.insert(leading_.begin(), count - leading_.size(), 1);
    for (std::size_t i = 0; i < count; ++i) {
      int64_t& known = leading_[leading_.size() - count + i];
      if (known != 1 && sizes[i] != 1 && known != sizes[i]) return false;
      known = known == 1 ? sizes[i] : known;
    }
    return true;
  }

  Labels labels(std::string_view word, const TensorInfo& tensor) const {
    if (!tensor.defined) return {};
    const std::size_t rest = *rest_of(word, tensor.sizes.size());
    Labels out;
    for (const char c : word) {
      if (c == '~') {
        out += Labels(rest, '-');
      } else if (c == '*') {
        const std::vector<int64_t> mine(tensor.sizes.begin(), tensor.sizes.begin() + static_cast<std::ptrdiff_t>(rest));
        out += broadcast_labels(mine, leading_, letters(leading_.size(), 'A'));
      } else {
        out += c;
      }
    }
    return out;
  }

  const OpCall& call_;
  std::vector<std::string_view> inputs_;
  std::vector<std::string_view> outputs_;
  std::vector<int64_t> leading_;
};

}  // namespace

std::optional<Signature> read_signature(std::string_view text, const OpCall& call) { return Reader(text, call).read(); }

OpRule rule_of(const SignatureEntry& entry, const OpCall& given) {
  OpCall call = given;
  const std::vector<std::string_view> texts = parts_of(entry.text, "|");
  // Where LibTorch could not determine the results, it has not checked the arguments either.
  if (std::none_of(texts.begin(), texts.end(), [&](std::string_view text) { return inputs_fit(text, call); }))
    return no_rule();
  if (entry.results != nullptr) call.outputs = entry.results(call);
  for (const std::string_view text : texts) {
    const std::optional<Signature> signature = read_signature(text, call);
    if (!signature) continue;
    OpRule rule{.strategies = shard_factors(signature->inputs, signature->outputs)};
    for (std::size_t k = 0; k < call.outputs.size(); ++k) {
      if (call.outputs[k].sizes != std::vector<int64_t>{0}) continue;  // a result that was not asked for
      for (Strategy& strategy : rule.strategies) strategy.outputs[k] = Replicate();
    }
    // Integers would be rounded term by term.
    const bool rounds = at::isIntegralType(call.inputs[0].dtype, /*includeBool=*/true);
    if (entry.passes == Passes::kLinear && !rounds) add_linear_where_exact(rule, call, {{0}});
    if (entry.passes == Passes::kMovement) add_movement(rule, call.inputs.size(), num_outputs(call));
    rule.outputs = call.outputs;
    if (!entry.size_arg.empty()) rule.size_arg = static_cast<int>(call.arg_index(entry.size_arg));
    return rule;
  }
  return no_rule();
}

}  // namespace tessera::rules
