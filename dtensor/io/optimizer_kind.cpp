#include "tessera/dtensor/io/optimizer_kind.h"

#include <cmath>
#include <deque>
#include <limits>
#include <optional>
#include <stdexcept>
#include <typeinfo>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/optimizer_fields.h"
#include "tessera/dtensor/io/strict_json.h"

namespace tessera {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

std::string field_name(const std::string& parameter, const std::string& field) { return parameter + "/" + field; }

std::string list_field(const char* field, std::size_t i) { return fmt::format("{}.{}", field, i); }

// ---- saving -----------------------------------------------------------------------------------------------------

struct StateSaver {
  const std::string& parameter;
  std::vector<SavedTensor>& tensors;

  void add(const std::string& field, const at::Tensor& tensor) {
    if (tensor.defined()) tensors.push_back({field_name(parameter, field), tensor});
  }
  void counter(const char* field, int64_t value) { add(field, at::scalar_tensor(value, at::kLong)); }
  void number(const char* field, double value) { add(field, at::scalar_tensor(value, at::kDouble)); }
  void of_parameter(const char* field, const at::Tensor& tensor) { add(field, tensor); }
  void optional_of_parameter(const char* field, const at::Tensor& tensor) { add(field, tensor); }
  void free(const char* field, const at::Tensor& tensor) { add(field, tensor); }
  void list(const char* field, const std::deque<at::Tensor>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) add(list_field(field, i), values[i]);
  }
};

// JSON has no infinity and no NaN, so they are written as text.
nlohmann::ordered_json json_number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

struct OptionsSaver {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();

  void number(const char* name, double value) { json[name] = json_number(value); }
  void counter(const char* name, int64_t value) { json[name] = value; }
  void counter(const char* name, const std::optional<int64_t>& value) {
    json[name] = value ? nlohmann::ordered_json(*value) : nullptr;
  }
  void flag(const char* name, bool value) { json[name] = value; }
  void text(const char* name, const std::optional<std::string>& value) {
    json[name] = value ? nlohmann::ordered_json(*value) : nullptr;
  }
};

// ---- loading ----------------------------------------------------------------------------------------------------

// Reads a tensor from the file, laid out as `parameter` if it has its shape, else replicated.
at::Tensor read_like(const Checkpoint& checkpoint, const std::string& name, const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  const std::vector<int64_t>& shape = checkpoint.find(name)->shape;
  if (!is_dtensor(parameter)) return checkpoint.read_box(name, whole_box(shape), parameter.device());
  const DeviceMesh& mesh = mesh_of(parameter);
  const bool alike = parameter.sizes() == at::IntArrayRef(shape);
  const Placements placements =
      alike ? placements_of(parameter) : Placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
  at::Tensor local;
  if (!mesh.is_member()) {
    local = at::empty({0}, at::TensorOptions().dtype(checkpoint.find(name)->dtype));
  } else if (!alike) {
    local = checkpoint.read_box(name, whole_box(shape), mesh.device());
  } else {
    // A part with gaps is packed in the host's memory, so that the GPU never holds what lies in them.
    const c10::Device device = box_has_gaps(parameter) ? c10::Device(at::kCPU) : mesh.device();
    local = held_part(parameter, checkpoint.read_box(name, held_box(parameter, name), device));
  }
  return from_local(local.to(mesh.device()), mesh, placements, {.shape = shape});
}

// Looks for the first tensor of a parameter's state, by the names of the fields: another parameter's name may begin
// with this one's and a slash.
struct StateFinder {
  const std::string& parameter;
  const std::set<std::string>& names;
  std::string first;  // in alphabetical order; "": there is none

  void look(const std::string& field) {
    const std::string name = field_name(parameter, field);
    if (names.contains(name) && (first.empty() || name < first)) first = name;
  }
  void counter(const char* field, int64_t&) { look(field); }
  void number(const char* field, double&) { look(field); }
  void of_parameter(const char* field, at::Tensor&) { look(field); }
  void optional_of_parameter(const char* field, at::Tensor&) { look(field); }
  void free(const char* field, at::Tensor&) { look(field); }
  void list(const char* field, std::deque<at::Tensor>&) { look(list_field(field, 0)); }
};

// Checks what the file has for each field of the state.
struct StatePlanner {
  const Checkpoint& checkpoint;
  const std::string& parameter;
  const at::Tensor& tensor;
  std::set<std::string>& unused;
  const char* op;

  const TensorEntry* take(const std::string& field) {
    const std::string name = field_name(parameter, field);
    unused.erase(name);
    return checkpoint.find(name);
  }
  const TensorEntry& need(const char* field) {
    if (const TensorEntry* entry = take(field)) return *entry;
    throw std::invalid_argument(
        fmt::format("{}: {} is missing in the file, which has other state of that parameter; load it into the class "
                    "and options of optimizer with which it was saved",
                    op, in_quotes(field_name(parameter, field))));
  }
  void need_scalar(const char* field, at::ScalarType dtype) {
    const TensorEntry& entry = need(field);
    if (entry.dtype == dtype && entry.shape.empty()) return;
    throw std::invalid_argument(fmt::format("{}: {} is {} of shape [{}] in the file, not one {}", op,
                                            in_quotes(entry.name), c10::toString(entry.dtype),
                                            fmt::join(entry.shape, ", "), c10::toString(dtype)));
  }
  void check_shape(const TensorEntry& entry) const {
    if (tensor.sizes() == at::IntArrayRef(entry.shape)) return;
    throw std::invalid_argument(fmt::format("{}: {} is [{}] in the file, but its parameter is [{}] in the module", op,
                                            in_quotes(entry.name), fmt::join(entry.shape, ", "),
                                            fmt::join(tensor.sizes(), ", ")));
  }

  void counter(const char* field, int64_t&) { need_scalar(field, at::kLong); }
  void number(const char* field, double&) { need_scalar(field, at::kDouble); }
  void of_parameter(const char* field, at::Tensor&) { check_shape(need(field)); }
  void optional_of_parameter(const char* field, at::Tensor&) {
    if (const TensorEntry* entry = take(field)) check_shape(*entry);
  }
  void free(const char* field, at::Tensor&) { take(field); }
  void list(const char* field, std::deque<at::Tensor>&) {
    for (std::size_t i = 0; take(list_field(field, i)) != nullptr; ++i) {
    }
  }
};

struct StateReader {
  const Checkpoint& checkpoint;
  const std::string& parameter;
  const at::Tensor& tensor;

  bool read_if_there(const std::string& field, at::Tensor& to) {
    const std::string name = field_name(parameter, field);
    if (checkpoint.find(name) == nullptr) return false;
    to = read_like(checkpoint, name, tensor);
    return true;
  }
  template <typename Value>
  Value scalar(const char* field) {
    return checkpoint.read_box(field_name(parameter, field), {}).template item<Value>();
  }

  void counter(const char* field, int64_t& to) { to = scalar<int64_t>(field); }
  void number(const char* field, double& to) { to = scalar<double>(field); }
  void of_parameter(const char* field, at::Tensor& to) { read_if_there(field, to); }
  void optional_of_parameter(const char* field, at::Tensor& to) { read_if_there(field, to); }
  void free(const char* field, at::Tensor& to) { read_if_there(field, to); }
  void list(const char* field, std::deque<at::Tensor>& to) {
    at::Tensor value;
    for (std::size_t i = 0; read_if_there(list_field(field, i), value); ++i) to.push_back(value);
  }
};

struct OptionsReader {
  const nlohmann::json& json;
  const char* op;
  std::size_t taken = 0;

  const nlohmann::json& need(const char* name) {
    const auto found = json.find(name);
    if (found == json.end()) refuse(name, "is missing");
    ++taken;
    return *found;
  }
  [[noreturn]] void refuse(const char* name, const std::string& what) const {
    throw std::invalid_argument(fmt::format("{}: param_groups: the option '{}' {}", op, name, what));
  }

  void number(const char* name, double& to) {
    const nlohmann::json& value = need(name);
    if (value == "nan")
      to = std::numeric_limits<double>::quiet_NaN();
    else if (value == "inf")
      to = std::numeric_limits<double>::infinity();
    else if (value == "-inf")
      to = -std::numeric_limits<double>::infinity();
    else if (value.is_number())
      to = value.get<double>();
    else
      refuse(name, "is not a number");
  }
  void counter(const char* name, int64_t& to) {
    const nlohmann::json& value = need(name);
    if (!value.is_number_integer()) refuse(name, "is not an integer");
    if (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX) refuse(name, "is larger than an int64");
    to = value.get<int64_t>();
  }
  void counter(const char* name, std::optional<int64_t>& to) {
    to.reset();
    if (json.contains(name) && !json[name].is_null())
      counter(name, to.emplace());
    else
      need(name);
  }
  void flag(const char* name, bool& to) {
    const nlohmann::json& value = need(name);
    if (!value.is_boolean()) refuse(name, "is not true or false");
    to = value.get<bool>();
  }
  void text(const char* name, std::optional<std::string>& to) {
    const nlohmann::json& value = need(name);
    if (!value.is_null() && !value.is_string()) refuse(name, "is not text");
    to = value.is_null() ? std::nullopt : std::optional(value.get<std::string>());
  }
};

// ---- the six classes ----------------------------------------------------------------------------------------------

// Returns `value` as a T. An optimizer that is derived from one of torch::optim's may keep a class of its own there.
template <typename T, typename Base>
const T& exactly(const Base& value, const char* optimizer, const char* what) {
  if (typeid(value) == typeid(T)) return static_cast<const T&>(value);
  throw std::invalid_argument(
      fmt::format("the optimizer is derived from {} and has {} of a class of its own, {}; save its state yourself",
                  optimizer, what, c10::demangle(typeid(value).name())));
}

template <typename State, typename Options>
class Kind final : public OptimizerKind {
 public:
  explicit Kind(const char* name) : name_(name) {}

  const char* name() const override { return name_; }

  void append_state(const OptimizerParamState& state, const std::string& parameter,
                    std::vector<SavedTensor>& tensors) const override {
    StateSaver saver{parameter, tensors};
    State copy = exactly<State>(state, name_, "a state");  // shares the tensors; visitors need a mutable state
    visit_state(copy, saver);
  }

  PlannedState plan_state(const Checkpoint& checkpoint, const std::string& parameter, const at::Tensor& tensor,
                          std::set<std::string>& unused, const char* op) const override {
    State state;
    StateFinder finder{parameter, unused, {}};
    visit_state(state, finder);
    if (finder.first.empty()) return {};
    StatePlanner planner{checkpoint, parameter, tensor, unused, op};
    visit_state(state, planner);
    const auto read_state = [&checkpoint, parameter, tensor] {
      auto read = std::make_unique<State>();
      StateReader reader{checkpoint, parameter, tensor};
      visit_state(*read, reader);
      return read;
    };
    return {.first_tensor = finder.first, .read = read_state};
  }

  nlohmann::ordered_json options_json(const OptimizerOptions& options) const override {
    OptionsSaver saver;
    Options copy = exactly<Options>(options, name_, "options");
    visit_options(copy, saver);
    return saver.json;
  }

  std::unique_ptr<OptimizerOptions> read_options(const nlohmann::json& json, const OptimizerOptions& base,
                                                 const char* op) const override {
    auto options = std::make_unique<Options>(exactly<Options>(base, name_, "options"));
    OptionsReader reader{json, op};
    visit_options(*options, reader);
    if (reader.taken != json.size()) {
      throw std::invalid_argument(
          fmt::format("{}: param_groups: a group has {} options, {} has {}", op, json.size(), name_, reader.taken));
    }
    return options;
  }

 private:
  const char* name_;
};

}  // namespace

const OptimizerKind& optimizer_kind(const torch::optim::Optimizer& optimizer, const char* op) {
  using namespace torch::optim;  // NOLINT: the names of all optimizers, in this function alone
  static const Kind<SGDParamState, SGDOptions> sgd("SGD");
  static const Kind<AdamParamState, AdamOptions> adam("Adam");
  static const Kind<AdamWParamState, AdamWOptions> adamw("AdamW");
  static const Kind<RMSpropParamState, RMSpropOptions> rmsprop("RMSprop");
  static const Kind<AdagradParamState, AdagradOptions> adagrad("Adagrad");
  static const Kind<LBFGSParamState, LBFGSOptions> lbfgs("LBFGS");
  if (dynamic_cast<const SGD*>(&optimizer) != nullptr) return sgd;
  if (dynamic_cast<const Adam*>(&optimizer) != nullptr) return adam;
  if (dynamic_cast<const AdamW*>(&optimizer) != nullptr) return adamw;
  if (dynamic_cast<const RMSprop*>(&optimizer) != nullptr) return rmsprop;
  if (dynamic_cast<const Adagrad*>(&optimizer) != nullptr) return adagrad;
  if (dynamic_cast<const LBFGS*>(&optimizer) != nullptr) return lbfgs;
  throw std::invalid_argument(
      fmt::format("{}: the optimizer is none of torch::optim's Adagrad, Adam, AdamW, LBFGS, RMSprop and "
                  "SGD; save the state of a class of your own yourself",
                  op));
}

}  // namespace tessera
