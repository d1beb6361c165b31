#include "tessera/tests/fuzz/subjects.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <sstream>
#include <stdexcept>

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/safetensors_header.h"
#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/dtensor/io/strict_json.h"
#include "tessera/mesh/environment.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/mesh.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/planner/cost_model.h"
#include "tessera/placement/planner/plan_redistribute.h"
#include "tessera/tests/fuzz/file_subjects.h"
#include "tessera/tools/launcher/launch_options.h"

namespace tessera::fuzz {
namespace {

// The first byte says how many bytes of data follow the header.
void read_header(std::string_view input) {
  if (input.empty()) return;
  const int64_t data_bytes = static_cast<unsigned char>(input[0]);
  const SafetensorsHeader header = parse_safetensors_header(input.substr(1), data_bytes, "f");
  require(header.data_bytes() == data_bytes, "a header's tensors tile its data");
  const std::string written = serialize_safetensors_header(header);
  require(parse_safetensors_header(std::string_view(written).substr(8), data_bytes, "f") == header,
          "a header that is written is read back");
}

void read_index(std::string_view input) {
  const WeightMap map = parse_checkpoint_index(input, "f");
  require(parse_checkpoint_index(serialize_checkpoint_index(map, 0), "f") == map, "an index is read back");
  for (const auto& [name, file] : map) require(file.find('/') == std::string::npos, "a file stays in its folder");
}

void read_manifest(std::string_view input) {
  const StateManifest manifest = parse_state_manifest(input, "f");
  require(serialize_state_manifest(manifest) ==
              serialize_state_manifest(parse_state_manifest(serialize_state_manifest(manifest), "f")),
          "a manifest is read back");
  for (const auto& [name, sums] : manifest.files) require(sums.file_bytes >= 0, "a file has a size");
}

// Gives the text of a manifest its checksum, so that what is behind the checksum is reached too.
void read_checked_manifest(std::string_view input) {
  read_manifest(fmt::format("{{\"crc32\": \"{:08x}\", \"state\": {}}}\n", crc32_of(input), input));
}

void read_groups(std::string_view input) { parse_unique_json(input, std::size_t{16} << 20, "f", "param_groups"); }

// "SHAPE | MESH | FROM | TO", such as "5 3 | 2 2 | [S(0), R] | [R, P(sum)]".
struct Layouts {
  std::vector<int64_t> shape, mesh;
  Placements from, to;
};

std::vector<int64_t> small_numbers(const std::string& text, int64_t low, int64_t high, std::size_t most) {
  std::istringstream in(text);
  std::vector<int64_t> out;
  for (int64_t value; in >> value;) {
    if (value < low || value > high || out.size() == most) throw std::invalid_argument("numbers out of range");
    out.push_back(value);
  }
  return out;
}

Layouts parse_layouts(std::string_view input) {
  std::vector<std::string> parts(1);
  for (const char c : input) {
    if (c == '|') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  const auto trimmed = [](std::string text) {
    text.erase(0, text.find_first_not_of(' '));
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  if (parts.size() != 4) throw std::invalid_argument("not four parts");
  Layouts out{.shape = small_numbers(parts[0], 0, 40, 3),
              .mesh = small_numbers(parts[1], 1, 4, 2),
              .from = parse_placements(trimmed(parts[2])),
              .to = parse_placements(trimmed(parts[3]))};
  if (out.mesh.empty()) throw std::invalid_argument("no mesh");
  return out;
}

Mesh mesh_of(const std::vector<int64_t>& shape) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < shape.size(); ++i) names.push_back(fmt::format("m{}", i));
  return Mesh(shape, names);
}

// Checks that the ranks' tiles hold each element once, or as often as mesh dimensions do not cut.
void check_tiles(const Layouts& given, const Placements& placements, const Mesh& mesh) {
  int64_t copies = 1, elements = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_shard()) copies *= given.mesh[i];
  }
  const int64_t ranks = c10::multiply_integers(given.mesh);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<int64_t> coordinate(given.mesh.size());
    for (int64_t left = rank, i = static_cast<int64_t>(given.mesh.size()) - 1; i >= 0; --i) {
      coordinate[static_cast<std::size_t>(i)] = left % given.mesh[static_cast<std::size_t>(i)];
      left /= given.mesh[static_cast<std::size_t>(i)];
    }
    elements += c10::multiply_integers(local_shape(given.shape, placements, given.mesh, coordinate));
  }
  require(elements == copies * c10::multiply_integers(given.shape), "the tiles hold each element once");
  (void)mesh;
}

void read_layouts(std::string_view input) {
  const Layouts given = parse_layouts(input);
  for (const Placements& each : {given.from, given.to}) {
    require(parse_placements(to_string(each)) == each, "placements that are printed are read back");
  }
  const Mesh mesh = mesh_of(given.mesh);
  const auto ndim = static_cast<int64_t>(given.shape.size());
  for (const Placements& each : {given.from, given.to}) {
    const Placements placements = normalize(each, mesh, ndim, "fuzz");
    check_layout(placements, mesh, given.shape, "fuzz");
    check_tiles(given, placements, mesh);
  }
  const Placements from = normalize(given.from, mesh, ndim, "fuzz"), to = normalize(given.to, mesh, ndim, "fuzz");
  const Plan plan = plan_redistribute(given.shape, at::kFloat, mesh, from, to);
  require(!plan.to_string().empty(), "a plan has a text");
}

void read_cost_model(std::string_view input) {
  const CostModel model = parse_cost_model(input);
  require(parse_cost_model(model.to_string()).to_string() == model.to_string(), "a cost model is read back");
}

// Lines of NAME=VALUE.
void read_environment(std::string_view input) {
  EnvironmentVariables variables;
  std::istringstream in{std::string(input)};
  for (std::string line; std::getline(in, line);) {
    const std::size_t equals = line.find('=');
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
  }
  const Environment environment = resolve_environment(variables);
  require(environment.rank >= 0 && environment.rank < environment.size, "a rank is in its world");
  require(environment.local_rank >= 0 && environment.local_size >= 1 && environment.local_size <= environment.size,
          "a local rank is on its host");
}

void read_failure(std::string_view input) {
  const std::optional<Failure> failure = decode_failure(std::string(input));
  if (!failure) return;
  require(decode_failure(encode(*failure)) == failure, "a failure is read back");
  to_string(*failure);
}

// One argument a line.
void read_arguments(std::string_view input) {
  std::vector<std::string> lines = {"launch"};
  std::istringstream in{std::string(input)};
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  std::vector<char*> argv;
  for (std::string& line : lines) argv.push_back(line.data());
  int exit_code = 0;
  const auto options = parse_launch_options(static_cast<int>(argv.size()), argv.data(), exit_code);
  if (!options) return;
  require(options->size >= 1 && options->size <= 4096 && !options->command.empty(), "a launch has ranks and a program");
  require(options->grace_s >= 1 && options->restarts >= 0, "a launch's times and numbers are in range");
}

std::string header_of(char data_bytes, const std::string& json) { return std::string(1, data_bytes) + json; }

// Returns what a manifest's checksum is of.
std::string state_in(const StateManifest& manifest) {
  const std::string text = serialize_state_manifest(manifest), before = "\"state\": ";
  const std::size_t begin = text.find(before) + before.size();
  return text.substr(begin, text.rfind('}') - begin);
}

std::vector<Subject> make_subjects() {
  const StateManifest plain = {.step = 3,
                               .random = {},
                               .scheduler_steps = 4,
                               .loss_scaler = {{.scale = 1024.0, .good_steps = 7}},
                               .values = {{"a", "b"}},
                               .files = {}};
  const StateManifest with_file = {.step = 0,
                                   .random = {},
                                   .scheduler_steps = {},
                                   .loss_scaler = {},
                                   .values = {},
                                   .files = {{"f", {.file_bytes = 5, .block_bytes = 4, .crc32 = {1, 2}}}}};
  return {
      {"safetensors_header",
       read_header,
       {header_of('\x18',
                  R"({"__metadata__":{"format":"pt"},"b":{"shape":[2,3],"dtype":"F32","data_offsets":[0,24]}})"),
        header_of('\x02', R"({"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"e":{"dtype":"I64","shape":[0,7],)"
                          R"("data_offsets":[2,2]}}   )"),
        header_of('\0', "{}")}},
      {"checkpoint_index",
       read_index,
       {R"({"metadata": {"total_size": 7, "x": [1, {"y": null}]}, "weight_map": {"a": "m-00001-of-00002.safetensors"}})",
        R"({"weight_map": {}})"}},
      {"state_manifest", read_manifest, {serialize_state_manifest(plain), serialize_state_manifest(with_file)}},
      {"checked_manifest", read_checked_manifest, {state_in(plain), state_in(with_file)}},
      {"param_groups",
       read_groups,
       {R"([{"options": {"lr": 0.1, "betas": [0.9, 0.999]}, "params": ["up.weight"]}])", "[[[[]]]]"}},
      {"layouts",
       read_layouts,
       {"5 3 | 2 2 | [S(0), R] | [R, P(sum)]", "7 | 3 | [P(avg)] | [S(0)]", "8 6 | 2 3 | [S(0), S(0)@1] | [S(1), S(0)]",
        "9 4 | 4 | [RS(0,3,5,1,0)] | [BC(0,2)]", "8 2 | 2 | [IS(0,0-2+6-8,2-6)] | [P(norm 2)]",
        "6 | 2 | [P(masked sum)] | [R]"}},
      {"cost_model", read_cost_model, {"120 us + 2000 MB/s, 10 us + 25000 MB/s", "0 us + 1 MB/s"}},
      {"environment",
       read_environment,
       {"RANK=1\nWORLD_SIZE=4\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=10.0.0.1\nMASTER_PORT=29500\n"
        "TORCHELASTIC_RUN_ID=x\nTORCHELASTIC_RESTART_COUNT=2",
        "SLURM_PROCID=3\nSLURM_STEP_NUM_TASKS=4\nSLURM_STEP_ID=0\nSLURM_STEP_TASKS_PER_NODE=2(x2)\nSLURM_NODEID=1\n"
        "SLURM_LOCALID=1\nSLURM_JOB_ID=7",
        "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=0\nOMPI_COMM_WORLD_LOCAL_SIZE=2\n"
        "TESSERA_TIMEOUT=5\nTESSERA_BACKEND=mpi\nTESSERA_SECRET=s",
        "TESSERA_RANK=0\nTESSERA_WORLD_SIZE=1\nTESSERA_CHECKED=1"}},
      {"failure",
       read_failure,
       {encode({Failure::Kind::kError, 2, "aten::mm", "index 7 is out of range"}),
        encode({Failure::Kind::kLost, -1, "", ""})}},
      {"launch_arguments",
       read_arguments,
       {"-n\n4\nprogram\n--flag", "--ranks=2\n--restarts\n3\n--min-ranks=1\n--time-limit\n2.5\n--backend\nmpi\n--\np"}},
      {"read_box", read_boxes, box_seeds()},
      {"load_optimizer", load_optimizer_state, optimizer_seeds()},
  };
}

}  // namespace

const std::vector<Subject>& subjects() {
  static const std::vector<Subject> all = make_subjects();
  return all;
}

const Subject& subject(std::string_view name) {
  std::vector<std::string> names;
  for (const Subject& each : subjects()) {
    if (each.name == name) return each;
    names.push_back(each.name);
  }
  throw std::invalid_argument(
      fmt::format("there is no subject '{}'; the subjects are {}", name, fmt::join(names, ", ")));
}

void try_input(const Subject& subject, std::string_view input) {
  try {
    subject.read(input);
  } catch (const std::invalid_argument&) {  // NOLINT: the input was refused, as it should be
  } catch (const std::runtime_error&) {     // NOLINT
  }
}

std::string mutated(const std::vector<std::string>& from, uint64_t seed) {
  static const std::vector<std::string> kWords = {"{",
                                                  "}",
                                                  "[",
                                                  "]",
                                                  ",",
                                                  ":",
                                                  "\"",
                                                  "\\u0000",
                                                  "\\",
                                                  "null",
                                                  "-1",
                                                  "0",
                                                  "18446744073709551615",
                                                  "1e999",
                                                  "9223372036854775807",
                                                  "-9223372036854775808",
                                                  "S(0)",
                                                  "P(sum)",
                                                  "R",
                                                  "@1",
                                                  "BC(0,4)",
                                                  "RS(0,",
                                                  "IS(0,0-2+",
                                                  "|",
                                                  "\n",
                                                  "=",
                                                  std::string(1, '\0'),
                                                  "\xff\xfe",
                                                  "..",
                                                  "/",
                                                  "(x",
                                                  "--",
                                                  "nan",
                                                  "inf"};
  std::mt19937_64 random(seed);
  const auto below = [&](std::size_t count) {
    return static_cast<std::size_t>(random() % std::max<std::size_t>(count, 1));
  };
  std::string out = from[below(from.size())];
  for (std::size_t changes = 1 + below(6); changes > 0; --changes) {
    const std::size_t at = below(out.size() + 1), count = below(8);
    const std::string& other = from[below(from.size())];
    switch (below(6)) {
      case 0:
        if (at < out.size()) out[at] = static_cast<char>(random());
        break;
      case 1:
        if (at < out.size()) out[at] = static_cast<char>(out[at] ^ (1 << below(8)));
        break;
      case 2: out.erase(at, count); break;
      case 3: out.insert(at, kWords[below(kWords.size())]); break;
      case 4: out.insert(at, other.substr(below(other.size() + 1), below(16))); break;
      default: out.insert(at, out.substr(at, below(40))); break;
    }
  }
  return out;
}

}  // namespace tessera::fuzz
