// The program as a user starts it, on a run folder that this test writes.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include "tessera/tests/generate/small_model.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tools/launcher/private_folder.h"

using tessera::testing::contains;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;

namespace {

namespace fs = std::filesystem;

const std::string kProgram = " examples/generate/generate ";

std::string on_ranks(int64_t ranks) {
  return fmt::format("timeout 120 tools/launcher/launch --no-prefix -n {}{}", ranks, kProgram);
}

// A run whose model has 128 tokens, and whose later checkpoint says something else than the first.
class TestRun {
 public:
  TestRun() {
    write_config();
    write_checkpoint(100);
    write_checkpoint(20);
  }
  std::string path() const { return folder_.path(); }
  std::string checkpoints() const { return path() + "/checkpoints"; }
  std::string checkpoint(int64_t step) const { return fmt::format("{}/step_{:08}", checkpoints(), step); }

  void write_checkpoint(int64_t step, at::ScalarType dtype = torch::kFloat) const {
    TransformerOptions options = small_options();
    options.vocabulary = 128;
    Transformer model = small_model(options);
    {
      const torch::NoGradGuard no_gradient;
      torch::manual_seed(static_cast<uint64_t>(step));
      model->head->weight.normal_();
      model->head->weight.copy_(model->head->weight.to(torch::kFloat));
    }
    save_small_model(model, checkpoints(), step, dtype);
  }

 private:
  void write_config() const {
    std::ofstream(path() + "/config.ini")
        << "# of a training program\ndata=\"corpus.txt\"\nhidden=16\nlayers=2\nheads=4\nsequence=16\ndropout=0.1\n"
           "tied=false\nvocabulary=128\nlearning-rate=0.001\n";
  }

  tessera::PrivateFolder folder_;
};

void flip_a_bit(const std::string& path, int64_t place) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(place);
  const int byte = file.get();
  file.seekp(place);
  file.put(static_cast<char>(byte ^ 1));
  file.close();
  if (!file) throw std::runtime_error("cannot change " + path);
}

std::string text_of(const std::string& command) {
  const ShellOutcome outcome = shell(command);
  CAPTURE(command);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  return outcome.output;
}

}  // namespace

TEST_CASE("generate: the same greedy text in float64 on 1, 2, 3 and 4 ranks, from the newest checkpoint") {
  const TestRun run;
  const std::string arguments = run.path() + " --prompt 'To be' --tokens 30 --dtype float64";
  const std::string alone = text_of("timeout 120" + kProgram + arguments);
  CHECK(alone.size() == 30);
  for (const int64_t ranks : {2, 3, 4}) {
    CAPTURE(ranks);
    CHECK(text_of(on_ranks(ranks) + arguments) == alone);
  }
  CHECK(text_of("timeout 120" + kProgram + arguments + " --step 100") == alone);
  CHECK(text_of("timeout 120" + kProgram + arguments + " --step 00000100") == alone);
  CHECK(text_of("timeout 120" + kProgram + arguments + " --step 20") != alone);
  std::ofstream(run.path() + "/prompt") << "To be";
  CHECK(text_of("timeout 120" + kProgram + run.path() + " --prompt-file " + run.path() +
                "/prompt --tokens 30 --dtype float64") == alone);
  // A run in float64 has the same values here.
  std::ofstream(run.path() + "/config.ini", std::ios::app) << "dtype=\"float64\"\n";
  for (const int64_t step : {20, 100}) run.write_checkpoint(step, torch::kDouble);
  CHECK(text_of(on_ranks(2) + arguments) == alone);
  // The first byte that is not written again before is a stop token's place.
  const auto stop = std::to_string(static_cast<int>(alone[10]));
  CHECK(text_of(on_ranks(2) + arguments + " --stop " + stop) == alone.substr(0, alone.find(alone[10])));
}

TEST_CASE("generate: a newest checkpoint that is not whole is passed over, and refused where its step is given") {
  struct Row {
    std::string why;
    std::function<void(const TestRun&)> harm;
    std::string refusal;
  };
  const std::vector<Row> rows = {
      {"no state.json", [](const TestRun& run) { fs::remove(run.checkpoint(300) + "/state.json"); }, "state.json"},
      {"no weights", [](const TestRun& run) { fs::remove(run.checkpoint(300) + "/model.safetensors"); },
       "model.safetensors"},
      {"weights that end early",
       [](const TestRun& run) { fs::resize_file(run.checkpoint(300) + "/model.safetensors", 5000); },
       "model.safetensors"},
      {"a changed state.json", [](const TestRun& run) { flip_a_bit(run.checkpoint(300) + "/state.json", 20); },
       "state.json"},
      {"an unfinished folder of another name",
       [](const TestRun& run) { fs::rename(run.checkpoint(300), run.checkpoints() + "/.step_00000300.tmp-01"); },
       "has no checkpoint of step 300; the newest is that of step 100"},
  };
  const TestRun run;
  const std::string arguments = run.path() + " --prompt 'To be' --tokens 12 --dtype float64";
  const std::string want = text_of("timeout 120" + kProgram + arguments);
  run.write_checkpoint(300);
  CHECK(text_of("timeout 120" + kProgram + arguments) != want);
  for (const Row& row : rows) {
    CAPTURE(row.why);
    fs::remove_all(run.checkpoint(300));
    run.write_checkpoint(300);
    row.harm(run);
    CHECK(text_of(on_ranks(2) + arguments) == want);
    const ShellOutcome refused = shell(on_ranks(2) + arguments + " --step 300");
    CAPTURE(refused.output);
    CHECK(refused.exit_code == 1);
    CHECK(contains(refused.output, row.refusal));
  }
}

TEST_CASE("generate: weights that are not what was saved are refused on every rank alike, whichever rank reads them") {
  const TestRun run;
  const std::string file = run.checkpoint(100) + "/model.safetensors";
  const auto bytes = static_cast<int64_t>(fs::file_size(file));
  for (const int64_t place : {bytes / 2, bytes - 1}) {
    CAPTURE(place);
    flip_a_bit(file, place);
    const ShellOutcome refused =
        shell("timeout 120 tools/launcher/launch -n 3" + kProgram + run.path() + " --prompt 'To be' --tokens 12 2>&1");
    CAPTURE(refused.output);
    CHECK(refused.exit_code == 1);
    for (const char* rank : {"[0] generate: ", "[1] generate: ", "[2] generate: "})
      CHECK(contains(refused.output, rank));
    CHECK(contains(refused.output, "model.safetensors"));
    CHECK(contains(refused.output, "checksum"));
    flip_a_bit(file, place);
  }
  CHECK(text_of(on_ranks(3) + run.path() + " --prompt 'To be' --tokens 12").size() == 12);
}

TEST_CASE("generate: drawn text follows from the seed, on any number of ranks; statistics go to standard error") {
  const TestRun run;
  const std::string drawn = run.path() + " --prompt a --tokens 20 --temperature 2 --top-k 40 --dtype float64 --seed ";
  const std::string text = text_of(on_ranks(2) + drawn + "3");
  CHECK(text == text_of(on_ranks(4) + drawn + "3"));
  CHECK(text != text_of(on_ranks(2) + drawn + "4"));
  CHECK(text == text_of(on_ranks(2) + drawn + "3 --statistics 2>/dev/null"));
  const std::string statistics = text_of(on_ranks(4) + drawn + "3 --statistics 2>&1 >/dev/null");
  CAPTURE(statistics);
  CHECK(std::regex_search(statistics, std::regex("^\n20 tokens, [0-9.]+ ms each")));
  // 2 layers of keys and values of 16 positions and 4 features, for each rank's one head of 4.
  for (int rank = 0; rank < 4; ++rank) {
    CHECK(std::regex_search(
        statistics,
        std::regex(fmt::format("rank {} +[0-9]+ bytes of weights, {} of keys and values", rank, 2 * 2 * 16 * 4 * 8))));
  }
}

TEST_CASE("generate: text is written as it comes, byte by byte, and a reader that goes ends the job") {
  const TestRun run;
  CHECK(text_of(on_ranks(2) + run.path() + " --prompt a --tokens 1000000000 2>/dev/null | head -c 5").size() == 5);
}

TEST_CASE("generate: mistakes are named, and the job ends") {
  struct Row {
    std::string why;
    int64_t ranks;
    std::string arguments;
    std::string want;
  };
  const TestRun run, broken;
  const std::string ok = run.path() + " --prompt a --tokens 1 ";
  std::ofstream(broken.path() + "/config.ini") << "hidden=16\nlayers=2\nsequence=16\n";
  const std::string other = run.path() + "/other";
  fs::create_directories(other);
  fs::copy(run.path() + "/config.ini", other + "/config.ini");
  const tessera::PrivateFolder wide;
  fs::copy(run.path(), wide.path(), fs::copy_options::recursive);
  std::ofstream(wide.path() + "/config.ini") << "hidden=32\nlayers=2\nsequence=16\nheads=4\nvocabulary=128\n";
  const std::vector<Row> rows = {
      {"no run", 1, "", "run is required"},
      {"no such run", 2, "no/such --prompt a", "'no/such/config.ini' cannot be read; give a folder that tools/train"},
      {"an unknown option", 1, ok + "--topk 3", "--top-k"},
      {"a sampling that is none", 1, ok + "--temperature -1", "--temperature: Value -1 not in range"},
      {"a seed without a temperature", 1, ok + "--seed 3", "--seed requires --temperature"},
      {"the likeliest tokens without a temperature", 1, ok + "--top-k 3", "--top-k requires --temperature"},
      {"a temperature that is no number", 1, ok + "--temperature nan", "the temperature is nan"},
      {"a dtype", 1, ok + "--dtype half", "--dtype: half not in {float32,float64}"},
      {"a device", 1, ok + "--device tpu", "--device: tpu not in {cpu,cuda}"},
      {"no prompt", 2, run.path(), "there is no prompt; give --prompt TEXT or --prompt-file FILE"},
      {"two prompts", 1, ok + "--prompt-file x", "--prompt excludes --prompt-file"},
      {"an empty file of the prompt", 2, run.path() + " --prompt-file /dev/null",
       "--prompt-file: '/dev/null' has no text; it must have one byte at least"},
      {"a file of the prompt", 2, run.path() + " --prompt-file no/such", "--prompt-file: 'no/such' cannot be read"},
      {"a byte that is no token", 2, run.path() + " --prompt $'ab\\xc3'",
       "byte 3 of the prompt is 195; the model's tokens are 0 to 127"},
      {"no such step", 2, ok + "--step 7", "has no checkpoint of step 7; the newest is that of step 100"},
      {"no checkpoint", 2, other + " --prompt a", "has no whole checkpoint"},
      {"a setting is missing", 2, broken.path() + " --prompt a", "--heads is required; it describes the model"},
      {"another model", 2, wide.path() + " --prompt a", "tok.weight"},
  };
  for (const Row& row : rows) {
    const ShellOutcome outcome = shell("bash -c \"exec " + on_ranks(row.ranks) + row.arguments + "\"");
    CAPTURE(row.why);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code != 0);
    CHECK(outcome.exit_code != 124);
    CHECK(contains(outcome.output, row.want));
  }
}
