#include "tessera/tests/fuzz/file_subjects.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/optimizer_contents.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/dtensor/io/safetensors_header.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/io/test_files.h"

namespace tessera::fuzz {
namespace {

// Is a file in memory that has a path. Each input overwrites it.
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("tessera fuzz", MFD_CLOEXEC)) { require(fd_ >= 0, "there is a file in memory"); }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  void write(const std::string& bytes) const {
    const bool written =
        ::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
    require(written, "a file in memory is written");
  }
  std::string path() const { return fmt::format("/proc/self/fd/{}", fd_); }

 private:
  int fd_;
};

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

// ---- boxes ----------------------------------------------------------------------------------------------------------

// A header of 4096 bytes has a hundred tensors at most; the first of them stand for all.
constexpr std::size_t kReadTensors = 8;

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}

  int64_t from_0_to(int64_t last) {
    return static_cast<int64_t>(random_() % (static_cast<uint64_t>(last) + 1));  // last may be INT64_MAX
  }

  TensorBox box_in(const std::vector<int64_t>& shape) {
    TensorBox box;
    for (const int64_t size : shape) {
      box.offsets.push_back(from_0_to(size));
      box.sizes.push_back(from_0_to(size - box.offsets.back()));
    }
    return box;
  }

  // Returns a box that is not within `shape`.
  TensorBox box_outside(const std::vector<int64_t>& shape) {
    TensorBox box = box_in(shape);
    if (shape.empty() || from_0_to(9) == 0) {
      box.sizes.push_back(1);
      return box;
    }
    const auto d = static_cast<std::size_t>(from_0_to(static_cast<int64_t>(shape.size()) - 1));
    switch (from_0_to(3)) {
      case 0: box.offsets[d] = -1 - from_0_to(INT64_MAX); break;
      case 1: box.sizes[d] = -1 - from_0_to(INT64_MAX); break;
      case 2: box.offsets[d] = shape[d] == INT64_MAX ? -1 : INT64_MAX - from_0_to(INT64_MAX - shape[d] - 1); break;
      default:
        box.sizes[d] = box.offsets[d] == 0 && shape[d] == INT64_MAX
                           ? -1
                           : INT64_MAX - from_0_to(INT64_MAX - (shape[d] - box.offsets[d]) - 1);
    }
    return box;
  }

 private:
  std::mt19937_64 random_;
};

// Returns the bytes of the box's elements, one after the other.
std::string expected_bytes(const TensorEntry& entry, const TensorBox& box, const std::string& data) {
  const auto element = static_cast<std::size_t>(c10::elementSize(entry.dtype));
  std::string out;
  if (std::ranges::find(box.sizes, 0) != box.sizes.end()) return out;
  std::vector<int64_t> at(box.sizes.size(), 0);
  while (true) {
    int64_t index = 0;
    for (std::size_t d = 0; d < at.size(); ++d) index = index * entry.shape[d] + box.offsets[d] + at[d];
    out += data.substr(static_cast<std::size_t>(entry.begin) + static_cast<std::size_t>(index) * element, element);
    std::size_t d = at.size();
    while (d > 0 && ++at[d - 1] == box.sizes[d - 1]) at[--d] = 0;
    if (d == 0) return out;
  }
}

// Calls `read`, which must return `want` and read no other bytes; or refuse bools that are none.
void check_read(const SafetensorsFile& file, const TensorEntry& entry, const std::string& want,
                const std::function<at::Tensor()>& read) {
  const bool has_other_bools =
      entry.dtype == at::kBool && std::ranges::any_of(want, [](char byte) { return byte != 0 && byte != 1; });
  const int64_t before = file.bytes_read();
  try {
    require(bytes_of(read()) == want, "a box has the bytes of its elements");
    require(!has_other_bools, "a BOOL is 0 or 1");
  } catch (const std::invalid_argument&) {
    require(has_other_bools, "a box within its tensor is read");
  } catch (const std::runtime_error&) {
    require(false, "the bytes of a box are in the file");
  }
  require(file.bytes_read() - before == static_cast<int64_t>(want.size()),
          "the bytes of a box are read, and no others");
}

void check_tensor(const SafetensorsFile& file, const TensorEntry& entry, const std::string& data, Draw& draw) {
  for (int i = 0; i < 3; ++i) {
    const TensorBox box = i == 0 ? whole_box(entry.shape) : draw.box_in(entry.shape);
    check_read(file, entry, expected_bytes(entry, box, data), [&] { return file.read_box(entry, box); });
  }
  const auto element = static_cast<int64_t>(c10::elementSize(entry.dtype));
  const int64_t elements = entry.nbytes() / element, start = draw.from_0_to(elements);
  const ElementRuns run = {.starts = {start}, .length = draw.from_0_to(elements - start)};
  const std::string bytes = data.substr(static_cast<std::size_t>(entry.begin + start * element),
                                        static_cast<std::size_t>(run.length * element));
  check_read(file, entry, bytes, [&] { return file.read_runs(entry, run); });
  bool refused = false;
  try {
    file.read_box(entry, draw.box_outside(entry.shape));
  } catch (const std::invalid_argument&) {
    refused = true;
  } catch (const std::runtime_error&) {
    require(false, "a box outside its tensor is not looked for in the file");
  }
  require(refused, "a box outside its tensor is refused");
}

// ---- the state of optimizers ------------------------------------------------------------------------------------

constexpr int64_t kMostStateBytes = 1 << 16;

using torch::optim::Optimizer;

DeviceMesh mesh_of_one_rank() {
  static const DeviceMesh mesh = init_device_mesh("cpu", {1}, {"m"}, make_in_process_worlds(1).front());
  return mesh;
}

// Has a parameter that is cut over one rank, or plain, and another one.
struct Parameters : torch::nn::Module {
  explicit Parameters(bool is_cut) {
    const at::Tensor a = at::zeros({2, 3});
    register_parameter("a", is_cut ? from_local(a, mesh_of_one_rank(), {Shard(0)}) : a, /*requires_grad=*/false);
    register_parameter("b", at::zeros({3}), /*requires_grad=*/false);
  }
};

// Names a class of optimizers, makes one, and lists the tensors of a whole state.
struct Class {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)> make;
  const char* tensors;
};

const std::vector<Class>& classes() {
  using namespace torch::optim;
  static const std::vector<Class> all = {
      {"SGD", [](auto params) { return std::make_unique<SGD>(std::move(params), SGDOptions(0.1).momentum(0.9)); },
       "F32 2,3 a/momentum_buffer\nF32 3 b/momentum_buffer\n"},
      {"Adam", [](auto params) { return std::make_unique<Adam>(std::move(params), AdamOptions(0.1).amsgrad(true)); },
       "I64 - a/step\nF32 2,3 a/exp_avg\nF32 2,3 a/exp_avg_sq\nF32 2,3 a/max_exp_avg_sq\n"
       "I64 - b/step\nF32 3 b/exp_avg\nF32 3 b/exp_avg_sq\nF32 3 b/max_exp_avg_sq\n"},
      {"AdamW", [](auto params) { return std::make_unique<AdamW>(std::move(params), AdamWOptions(0.1)); },
       "I64 - a/step\nF32 2,3 a/exp_avg\nF32 2,3 a/exp_avg_sq\n"},
      {"RMSprop", [](auto params) { return std::make_unique<RMSprop>(std::move(params), RMSpropOptions(0.1)); },
       "I64 - b/step\nF32 3 b/square_avg\nF32 3 b/momentum_buffer\nF32 3 b/grad_avg\n"},
      {"Adagrad", [](auto params) { return std::make_unique<Adagrad>(std::move(params), AdagradOptions(0.1)); },
       "I64 - a/step\nF32 2,3 a/sum\nI64 - b/step\nF32 3 b/sum\n"},
      {"LBFGS", [](auto params) { return std::make_unique<LBFGS>(std::move(params), LBFGSOptions(1).max_eval(9)); },
       "I64 - a/func_evals\nI64 - a/n_iter\nF64 - a/t\nF64 - a/prev_loss\nF32 9 a/d\nF32 - a/H_diag\n"
       "F32 9 a/prev_flat_grad\nF32 9 a/old_dirs.0\nF32 9 a/old_stps.0\nF32 - a/ro.0\nF32 - a/ro.1\n"},
  };
  return all;
}

// Holds an optimizer that states are loaded into, with its module.
struct Loaded {
  Parameters module;
  std::unique_ptr<Optimizer> optimizer;

  Loaded(const Class& of, bool is_cut) : module(is_cut), optimizer(of.make(module.parameters())) {}
};

std::string groups_of(const Class& of) {
  const Loaded fresh(of, false);
  return optimizer_contents(*fresh.optimizer, fresh.module, "fuzz").metadata.at("param_groups");
}

std::optional<at::ScalarType> dtype_named(std::string_view name) {
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<at::ScalarType>(i);
    if (safetensors_dtype_name(dtype) == name) return dtype;
  }
  return std::nullopt;
}

// Reads "DTYPE SHAPE NAME".
TensorEntry parse_tensor(const std::string& line) {
  std::istringstream in(line);
  std::string dtype, shape, name;
  in >> dtype >> shape;
  std::getline(in >> std::ws, name);
  const std::optional<at::ScalarType> found = dtype_named(dtype);
  if (!found) throw std::invalid_argument("no dtype");
  std::ranges::replace(shape, ',', ' ');
  TensorEntry entry = {.name = name, .dtype = *found, .shape = {}, .begin = 0, .end = 0};
  std::istringstream sizes(shape);
  for (int64_t size; sizes >> size;) entry.shape.push_back(size);
  return entry;
}

struct State {
  const Class* of = nullptr;
  SafetensorsHeader header;
  std::string data;
};

State parse_state(std::string_view input) {
  std::istringstream in{std::string(input)};
  std::string name, saved_name, groups;
  std::getline(in, name);
  std::getline(in, saved_name);
  std::getline(in, groups);
  const auto of = std::ranges::find(classes(), name, &Class::name);
  if (of == classes().end()) throw std::invalid_argument("no class of optimizers");
  std::vector<TensorEntry> tensors;
  for (std::string line; std::getline(in, line);) tensors.push_back(parse_tensor(line));
  State state = {.of = &*of,
                 .header = {{{"optimizer", saved_name}, {"param_groups", groups}}, lay_out_tensors(std::move(tensors))},
                 .data = {}};
  if (state.header.data_bytes() > kMostStateBytes) throw std::invalid_argument("a state that is large, but true");
  // Bytes of 0 and 1 are values of every dtype.
  for (int64_t i = 0; i < state.header.data_bytes(); ++i) state.data += static_cast<char>(i % 3 % 2);
  return state;
}

std::string described(at::ScalarType dtype, at::IntArrayRef shape, std::string_view bytes) {
  return fmt::format("{} [{}] {}", c10::toString(dtype), fmt::join(shape, ","), bytes);
}

// Returns what save_optimizer would write: the class, and each tensor's dtype, shape and bytes; and as JSON the
// options.
struct Saved {
  std::map<std::string, std::string> tensors;
  std::string name;
  nlohmann::json groups;

  friend bool operator==(const Saved&, const Saved&) = default;
};

Saved saved_by(const Loaded& loaded) {
  const OptimizerContents contents = optimizer_contents(*loaded.optimizer, loaded.module, "fuzz");
  Saved saved = {.tensors = {},
                 .name = contents.metadata.at("optimizer"),
                 .groups = nlohmann::json::parse(contents.metadata.at("param_groups"))};
  for (const SavedTensor& each : contents.tensors) {
    const at::Tensor piece = is_dtensor(each.tensor) ? to_local(each.tensor) : each.tensor;
    saved.tensors[each.name] = described(piece.scalar_type(), each.tensor.sizes(), bytes_of(piece));
  }
  return saved;
}

Saved saved_in(const State& state) {
  Saved saved = {.tensors = {},
                 .name = state.header.metadata.at("optimizer"),
                 .groups = nlohmann::json::parse(state.header.metadata.at("param_groups"))};
  for (const TensorEntry& each : state.header.tensors) {
    const std::string_view bytes(state.data.data() + each.begin, static_cast<std::size_t>(each.nbytes()));
    saved.tensors[each.name] = described(each.dtype, each.shape, bytes);
  }
  return saved;
}

// Loads the state at `path` into an optimizer of its class. Returns the text with which it is refused, or "".
std::string load(const State& state, bool is_cut, const std::string& path) {
  // They stay until the process ends, since their mesh's World would end after what it uses.
  static auto& optimizers = *new std::map<std::pair<std::string, bool>, std::unique_ptr<Loaded>>();
  std::unique_ptr<Loaded>& loaded = optimizers[{state.of->name, is_cut}];
  if (loaded == nullptr) loaded = std::make_unique<Loaded>(*state.of, is_cut);
  const Saved before = saved_by(*loaded);
  try {
    load_optimizer(*loaded->optimizer, loaded->module, path);
  } catch (const std::invalid_argument& error) {
    require(saved_by(*loaded) == before, "an optimizer stays as it was when its state is refused");
    return error.what();
  }
  require(saved_by(*loaded) == saved_in(state), "a state that is loaded would be saved as it was");
  return "";
}

}  // namespace

void require(bool holds, const char* property) {
  if (!holds) throw std::logic_error(property);
}

void read_boxes(std::string_view input) {
  if (input.size() < 2) return;
  const std::string data = distinct_bytes(static_cast<unsigned char>(input[0]));
  static const MemoryFile memory;
  memory.write(safetensors_bytes(std::string(input.substr(2)), data));
  const SafetensorsFile file(memory.path());
  Draw draw(static_cast<unsigned char>(input[1]));
  for (std::size_t i = 0; i < std::min(file.tensors().size(), kReadTensors); ++i) {
    check_tensor(file, file.tensors()[i], data, draw);
  }
  require(file.fingerprint() == SafetensorsFile(memory.path()).fingerprint(), "a file has one fingerprint");
}

std::vector<std::string> box_seeds() {
  const auto seed = [](char data_bytes, char drawn, const std::string& json) {
    return std::string(1, data_bytes) + drawn + json;
  };
  return {seed('\x30', 'a',
               R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
               R"("b":{"dtype":"U8","shape":[2,3,4],"data_offsets":[24,48]}})"),
          seed('\x0a', 'b',
               R"({"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]},)"
               R"("n":{"dtype":"BOOL","shape":[1,1,2],"data_offsets":[8,10]}})"),
          seed('\0', 'c', R"({"e":{"dtype":"U8","shape":[0,9223372036854775807],"data_offsets":[0,0]}})")};
}

void load_optimizer_state(std::string_view input) {
  const State state = parse_state(input);
  static const MemoryFile memory;
  memory.write(serialize_safetensors_header(state.header) + state.data);
  // The ranks of a mesh agree on an error, which makes any of them an invalid_argument or a runtime_error; one process
  // passes it on as it is.
  const std::string refused = load(state, false, memory.path());
  require(load(state, true, memory.path()) == refused, "a rank alone refuses what one process refuses");
  if (!refused.empty()) throw std::invalid_argument(refused);
}

std::vector<std::string> optimizer_seeds() {
  std::vector<std::string> seeds;
  for (const Class& each : classes()) {
    const std::string start = fmt::format("{0}\n{0}\n{1}\n", each.name, groups_of(each));
    seeds.push_back(start + each.tensors);
    seeds.push_back(start);
  }
  return seeds;
}

}  // namespace tessera::fuzz
