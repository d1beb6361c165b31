// The program as a user starts it, by tools/launch: stopped, resumed on other meshes, refused, and on a terminal.

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/examples/train/metrics.h"
#include "tessera/tests/harness/over_mpi.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/train/text_folder.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing::contains;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;

// Holds a folder with text and the folders of runs on it.
struct Folders {
  tessera::PrivateFolder folder;
  std::string data = folder.path() + "/data";

  Folders() { tessera::testing::write_text_folder(data, 12); }
  std::string run(const std::string& name) const { return folder.path() + "/" + name; }
};

// Returns the program and its arguments.
std::string program(const Folders& folders, const std::string& run, const std::string& arguments) {
  return fmt::format(
      "examples/train/train --run {} --data {} --hidden 16 --layers 2 --heads 4 --sequence 16 --batch 8 --steps 10 "
      "--log-every 1 --warm-up 2 {}",
      folders.run(run), folders.data, arguments);
}

// Returns how to start ranks: what comes before their command.
std::string launch(int ranks, const std::string& options = "") {
  return fmt::format("timeout 120 tools/launcher/launch --no-prefix {}-n {} ", options, ranks);
}
std::string launch_once_more(int ranks) { return launch(ranks, "--restarts 1 "); }
std::string torchrun_once_more(int ranks) {
  return fmt::format(
      "timeout 120 {} -m torch.distributed.run --standalone --no-python --nproc_per_node {} --max-restarts 1 ",
      std::getenv("PYTHON"), ranks);
}

std::string command(const Folders& folders, int ranks, const std::string& run, const std::string& arguments) {
  return launch(ranks) + program(folders, run, arguments);
}

ShellOutcome outcome_of(const Folders& folders, int ranks, const std::string& run, const std::string& arguments) {
  return shell(command(folders, ranks, run, arguments));
}

// Runs the program by `start`. In the first attempt `first` is run instead, in whose text PROGRAM is the program and
// its arguments; in the second, the program alone.
ShellOutcome restarted(const Folders& folders, const std::string& start, const std::string& run,
                       const std::string& arguments, const std::string& first, const std::string& variables = "") {
  const std::string second = program(folders, run, arguments), script = folders.run("attempt.sh");
  std::ofstream(script) << variables << "\nif [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then\n"
                        << std::regex_replace(first, std::regex("PROGRAM"), second) << "\nfi\nexec " << second << "\n";
  return shell(start + "bash " + script);
}

std::string output_of(const Folders& folders, int ranks, const std::string& run, const std::string& arguments) {
  const ShellOutcome outcome = outcome_of(folders, ranks, run, arguments);
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  return outcome.output;
}

// Returns the losses of all steps of a run, in their order.
std::vector<double> losses_of(const Folders& folders, const std::string& run) {
  std::vector<double> losses;
  for (const train::Metric& metric : train::read_metrics(folders.run(run) + "/metrics.jsonl")) {
    if (metric.bits_per_byte) continue;
    CHECK(metric.step == static_cast<int64_t>(losses.size()) + 1);
    losses.push_back(metric.loss);
  }
  return losses;
}

void check_close(const std::vector<double>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(std::abs(got[i] - want[i]) <= 1e-9);
  }
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Has tools/train in a checkout of its own, where the program is built already, and a folder from which it is called.
class Checkout {
 public:
  Checkout() : root_(folder_.path() + "/a checkout") {
    fs::create_directories(root_ + "/tools");
    fs::create_directories(root_ + "/bin/examples/train");
    fs::create_directories(caller());
    for (const char* name : {"train", "lib.sh"}) {
      fs::copy_file(fs::canonical(std::string("tools/") + name), root_ + "/tools/" + name);
    }
    fs::create_symlink(fs::canonical("examples/train/train"), root_ + "/bin/examples/train/train");
    fs::create_symlink(fs::canonical("tools/launcher/launch"), root_ + "/tools/launch");
    std::ofstream(root_ + "/tools/setup") << "#!/bin/sh\n";
    std::ofstream(root_ + "/bin/bazel") << "#!/bin/sh\nif [ $1 = info ]; then echo '" << root_ << "/bin'; fi\n";
    for (const char* name : {"/tools/setup", "/bin/bazel"}) fs::permissions(root_ + name, fs::perms::owner_all);
  }

  std::string caller() const { return folder_.path() + "/a caller"; }
  std::string command(const std::string& arguments) const {
    return fmt::format("PATH='{0}/bin':\"$PATH\" timeout 120 '{0}/tools/train' {1}", root_, arguments);
  }
  // Calls the script for a small model on two ranks.
  ShellOutcome train(const std::string& arguments) const {
    return shell(fmt::format("cd '{}' && {}", caller(),
                             command("--mesh dp=2 --hidden 16 --layers 1 --heads 4 --sequence 16 " + arguments)));
  }
  // Returns the folders below runs/.
  std::vector<std::string> runs() const {
    std::vector<std::string> out;
    for (const fs::directory_entry& each : fs::directory_iterator(root_ + "/runs")) out.push_back(each.path().string());
    return out;
  }

 private:
  tessera::PrivateFolder folder_;
  std::string root_;
};

std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

// Starts "run" on two ranks, and sends SIGTERM to the launcher once the shell's `condition` holds.
ShellOutcome ended_by_sigterm(const Folders& folders, const std::string& options, const std::string& condition) {
  return shell(command(folders, 2, "run", options) + " &\njob=$!\n" +
               fmt::format("until {} 2>/dev/null || ! kill -0 $job; do sleep 0.05; done\n", condition) +
               "kill -TERM $job\nwait $job");
}

}  // namespace

TEST_CASE("train: a run prints and writes what its page says, and ends with the difference from one process") {
  const Folders folders;
  const std::string output = output_of(folders, 4, "run", "--mesh dp=2,tp=2 --validate-every 5 --save-every 4");
  for (const std::string part :
       {"data: 11 files", "1 files, 0.0 MB held out", "data's hash: ", "training on {dp: 2, tp: 2}",
        "step 10/10  loss ", "after step 5: about ", "it wrote, after", "report: "}) {
    CAPTURE(part);
    CAPTURE(output);
    CHECK(contains(output, part));
  }
  CHECK(!contains(output, "\x1b"));
  CHECK(std::regex_search(output, std::regex("\nvalidation: [0-9.]+ bits per byte \\(order-2 bytes: [0-9.]+\\)\n")));
  std::smatch match;
  const std::string last = last_line(output);
  REQUIRE(std::regex_match(last, match, std::regex("largest difference from one process: ([0-9.e+-]+)")));
  CHECK(std::stod(match[1].str()) <= 1e-9);
  for (const char* name : {"config.ini", "metrics.jsonl", "report.html", "checkpoints/step_00000004/model.safetensors",
                           "checkpoints/step_00000008", "checkpoints/step_00000010/optimizer.safetensors"}) {
    CAPTURE(name);
    CHECK(fs::exists(folders.run("run") + "/" + name));
  }
  CHECK(losses_of(folders, "run").size() == 10);
  const std::string report = read_file(folders.run("run") + "/report.html");
  for (const std::string part : {"<title>step 2</title>", ">rank 0</text>", ">rank 3</text>", "<title>forward, ",
                                 "<title>backward, ", ">collectives on tp</text>", "all_reduce",
                                 "<figcaption>tok.weight, and ", "<figcaption>layers.0.attn.wo.weight, and ",
                                 "] on {dp: 2, tp: 2} as [R, S(0)]</text>", "torch::nn::LinearImpl"}) {
    CAPTURE(part);
    CHECK(contains(report, part));
  }
}

TEST_CASE("train: a run that stopped and went on, on any mesh, has the losses of one that did not stop") {
  const Folders folders;
  const std::string exact = "--dtype float64 --dropout 0.2 --check-steps 0 --validate-every 3 ";
  output_of(folders, 4, "whole", exact + "--mesh dp=2,tp=2");
  const std::vector<double> want = losses_of(folders, "whole");
  REQUIRE(want.size() == 10);
  CHECK(want.back() < want.front());
  const std::string stopped = output_of(folders, 4, "first", exact + "--mesh dp=2,tp=2 --stop-at 4");
  CHECK(contains(stopped, "stopped after step 4, which is saved; --resume"));
  CHECK(losses_of(folders, "first").size() == 4);
  CHECK(contains(output_of(folders, 4, "first", "--resume --mesh dp=2,tp=2 --stop-at 3"), "stopped after step 4"));
  CHECK(losses_of(folders, "first").size() == 4);
  struct Row {
    int ranks;
    const char* mesh;
  };
  for (const Row& row : {Row{4, "dp=2,tp=2"}, Row{4, "tp=4"}, Row{4, "dp=4"}, Row{2, "dp=2"}, Row{3, "dp=3"},
                         Row{3, "tp=3"}, Row{1, "dp=1"}, Row{4, "dp=4 --zero"}}) {
    CAPTURE(row.mesh);
    fs::remove_all(folders.run("second"));
    fs::copy(folders.run("first"), folders.run("second"), fs::copy_options::recursive);
    const std::string output = output_of(folders, row.ranks, "second", fmt::format("--resume --mesh {}", row.mesh));
    CHECK(contains(output, "goes on after step 4"));
    check_close(losses_of(folders, "second"), want);
  }
}

TEST_CASE("train: a job that starts its ranks again goes on after the newest checkpoint, or begins anew") {
  const Folders folders;
  const std::string arguments = "--mesh dp=2 --dtype float64 --dropout 0.2 --check-steps 0";
  output_of(folders, 2, "whole", arguments);
  struct Row {
    const char* run;
    std::string start;
    std::string first;
    std::string text;
  };
  for (const Row& row :
       {Row{"saved", launch_once_more(2), "PROGRAM --stop-at 4 && exit 9", "goes on after step 4"},
        // The newest checkpoint has the right sizes and the wrong bytes.
        Row{"damaged", launch_once_more(2),
            fmt::format("PROGRAM --stop-at 4 --save-every 2 && {{ [ $RANK = 1 ] || {{ truncate -s -8 {0} && "
                        "printf damaged. >>{0}; }}; }} && exit 9",
                        folders.run("damaged/checkpoints/step_00000004/model.safetensors")),
            "goes on after step 2"},
        Row{"killed", launch_once_more(2), "kill -9 $$", "training on {dp: 2, tp: 1}"},
        Row{"torchrun", torchrun_once_more(2), "PROGRAM --stop-at 4 && kill -9 $$", "goes on after step 4"}}) {
    CAPTURE(row.run);
    const ShellOutcome outcome = restarted(folders, row.start, row.run, arguments, row.first);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 0);
    if (contains(row.start, "--restarts")) {
      CHECK(contains(outcome.output, "; restart 1 of 1 starts, with 2 ranks\n"));
    }
    CHECK(contains(outcome.output, row.text));
    CHECK(contains(outcome.output, "an older state is looked for") == (row.run == std::string("damaged")));
    check_close(losses_of(folders, row.run), losses_of(folders, "whole"));
  }
}

TEST_CASE("train: over MPI too a job that starts its ranks again goes on after the newest checkpoint") {
  if (const std::string missing = tessera::testing::why_no_mpi(); !missing.empty()) TESSERA_SKIP_MISSING(missing);
  const Folders folders;
  const std::string arguments = "--mesh dp=2 --dtype float64 --dropout 0.2 --check-steps 0";
  output_of(folders, 2, "whole", arguments);
  const ShellOutcome outcome = restarted(folders, launch(2, "--backend mpi --restarts 1 "), "run", arguments,
                                         "PROGRAM --stop-at 4 && kill -9 $$");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(contains(outcome.output, "restart 1 of 1 starts, with 2 ranks"));
  CHECK(contains(outcome.output, "goes on after step 4"));
  check_close(losses_of(folders, "run"), losses_of(folders, "whole"));
}

TEST_CASE("train: a rank of four is killed while it trains: the job goes on from the newest checkpoint") {
  const Folders folders;
  const std::string job =
      launch_once_more(4) + program(folders, "run", "--mesh dp=2,tp=2 --check-steps 0 --steps 1000000 --save-every 5");
  const std::string output = folders.run("output");
  // Steps of the second attempt follow "goes on after step".
  const ShellOutcome outcome =
      shell(fmt::format("{0} > {1} 2>&1 &\njob=$!\n"
                        "until grep -q 'step 13/' {1} || ! kill -0 $job; do sleep 0.01; done\n"
                        "kill -9 $(pgrep -f '^{2} ' | tail -1)\nstart=$(date +%s%N)\n"
                        "until sed '1,/goes on after/d' {1} | grep -q '^step ' || ! kill -0 $job; do sleep 0.01; done\n"
                        "echo \"milliseconds: $((($(date +%s%N) - start) / 1000000))\"\n"
                        "kill -TERM $job\nwait $job\necho \"code $?\"\ncat {1}\n",
                        job, output, "examples/train/train --run " + folders.run("run")));
  CAPTURE(outcome.output);
  CHECK(contains(outcome.output, "was killed by signal 9"));
  CHECK(contains(outcome.output, "restart 1 of 1 starts, with 4 ranks"));
  std::smatch match;
  REQUIRE(std::regex_search(outcome.output, match, std::regex("goes on after step ([0-9]+)")));
  CHECK(std::stoll(match[1].str()) >= 10);
  CHECK(std::stoll(match[1].str()) % 5 == 0);
  REQUIRE(std::regex_search(outcome.output, match, std::regex("milliseconds: ([0-9]+)")));
  MESSAGE("from SIGKILL to the first step of the next attempt: " << match[1].str() << " ms");
  CHECK(contains(outcome.output, "code 0\n"));
}

TEST_CASE("train: a job that starts its ranks again does not go on with the run of another job") {
  const Folders folders;
  const std::string arguments = "--mesh dp=1 --check-steps 0 --stop-at 2";
  // torchrun gives jobs the same name.
  for (const std::string variables : {"", "export TORCHELASTIC_RUN_ID=none"}) {
    CAPTURE(variables);
    const std::string run = variables.empty() ? "named" : "none";
    CHECK(restarted(folders, launch_once_more(1), run, arguments, "PROGRAM; exit 0", variables).exit_code == 0);
    const ShellOutcome outcome = restarted(folders, launch_once_more(1), run, arguments, "PROGRAM; exit 1", variables);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 1);
    const std::size_t first = outcome.output.find("has a run; give --resume");
    REQUIRE(first != std::string::npos);
    CHECK(outcome.output.find("has a run; give --resume", first + 1) != std::string::npos);
  }
}

TEST_CASE("train: from meshes of 4 ranks to others, with accumulation, ZeRO-3 and activation checkpoints") {
  const Folders folders;
  const std::string exact =
      "--dtype float64 --check-steps 0 --validate-every 0 --accumulate 2 --tied --activation-checkpoint ";
  output_of(folders, 4, "whole", exact + "--mesh dp=4 --zero");
  output_of(folders, 4, "parts", exact + "--mesh dp=4 --zero --stop-at 3");
  output_of(folders, 3, "parts", "--resume --mesh dp=3 --stop-at 7");
  output_of(folders, 4, "parts", "--resume --mesh tp=4 --zero=0");
  check_close(losses_of(folders, "parts"), losses_of(folders, "whole"));
}

TEST_CASE("train: a resumed run takes the options of the call: the weight decay too") {
  const Folders folders;
  const std::string exact = "--dtype float64 --check-steps 0 --validate-every 0 --mesh dp=1 ";
  output_of(folders, 1, "kept", exact + "--weight-decay 0.1 --stop-at 2");
  fs::copy(folders.run("kept"), folders.run("changed"), fs::copy_options::recursive);
  output_of(folders, 1, "kept", "--resume");
  output_of(folders, 1, "changed", "--resume --weight-decay 10");
  const std::vector<double> kept = losses_of(folders, "kept"), changed = losses_of(folders, "changed");
  REQUIRE(kept.size() == changed.size());
  CHECK(kept[1] == changed[1]);
  CHECK(std::abs(kept.back() - changed.back()) > 1e-6);
}

TEST_CASE("train: SIGTERM saves the run and ends it") {
  const Folders folders;
  // It is sent once the run has written a step.
  const ShellOutcome outcome = ended_by_sigterm(folders, "--mesh dp=2 --check-steps 0 --steps 1000000",
                                                "grep -q loss " + folders.run("run/metrics.jsonl"));
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  std::smatch match;
  REQUIRE(std::regex_search(outcome.output, match, std::regex("stopped after step ([0-9]+), which is saved")));
  const auto steps = static_cast<std::size_t>(std::stoll(match[1].str()));
  CHECK(losses_of(folders, "run").size() == steps);
  CHECK(fs::exists(folders.run("run") + fmt::format("/checkpoints/step_{:08}/model.safetensors", steps)));
}

TEST_CASE("train: SIGTERM after the last step, which is saved, ends it at once") {
  const Folders folders;
  const ShellOutcome outcome = ended_by_sigterm(folders, "--mesh dp=2 --check-steps 100000000",
                                                "test -e " + folders.run("run/checkpoints/step_00000010/state.json"));
  CAPTURE(outcome.output);
  // It may come before the ranks have seen that the state is saved.
  const bool is_seen = contains(outcome.output, "stopped after the last step, which is saved; --resume");
  CHECK(outcome.exit_code == (is_seen ? 0 : 128 + 15));
  const std::string resumed = output_of(folders, 2, "run", "--mesh dp=2 --resume --check-steps 0");
  CHECK(contains(resumed, "validation: "));
}

TEST_CASE("train: a second job in the folder of one that trains is refused on every rank, and changes nothing there") {
  const Folders folders;
  const std::string run = folders.run("run"), output = folders.run("output");
  const std::string endless = "--mesh dp=1 --check-steps 0 --steps 1000000 --save-every 5";
  const ShellOutcome outcome = shell(fmt::format(
      "{0} > {1} 2>&1 &\njob=$!\n"
      "until test -e {2}/checkpoints/step_00000005/state.json || ! kill -0 $job; do sleep 0.05; done\n"
      "file=$(stat -c %i {2}/metrics.jsonl)\n"
      "for more in '' --resume; do {3} $more; echo \"code $?\"; done\n"
      "test $file = $(stat -c %i {2}/metrics.jsonl) && echo 'the same file'\n"
      "kill -9 $(pgrep -f '^examples/train/train --run {2} ' | tail -1)\nwait $job\n"
      "test -e {2}/.lock && echo 'the lock was left'\n"
      "{4}; echo \"code $?\"; ls -A {2}\n",
      command(folders, 1, "run", endless), output, run, command(folders, 2, "run", "--mesh dp=2 --check-steps 0"),
      command(folders, 1, "run", "--mesh dp=1 --resume --check-steps 0 --steps 1000000 --stop-at 1")));
  CAPTURE(outcome.output);
  const std::string refused = fmt::format(
      "rank 0: another process is training in this folder: '{}'; wait until it ends, or give another --run\n", run);
  std::size_t at = 0;
  for (int i = 0; i < 4; ++i) {  // two ranks, twice
    at = outcome.output.find(refused, at);
    REQUIRE(at != std::string::npos);
    at += refused.size();
  }
  const std::size_t second = outcome.output.find("code 1\n", outcome.output.find("code 1\n") + 1);
  REQUIRE(second != std::string::npos);
  for (const char* part : {"the same file\n", "the lock was left\n", "goes on after step ", "code 0\n"}) {
    CAPTURE(part);
    CHECK(contains(outcome.output, part));
  }
  CHECK(outcome.output.find("code 0\n") > second);
  CHECK(!fs::exists(run + "/.lock"));
  CHECK(!contains(read_file(output), "another process"));
}

TEST_CASE("train: of two new jobs in one folder, also one that is not there, one trains and the other is refused") {
  const Folders folders;
  const ShellOutcome outcome =
      shell(fmt::format("{0} >{1} 2>&1 & first=$!\n{0} >{2} 2>&1 & second=$!\n"
                        "while kill -0 $first && kill -0 $second; do sleep 0.05; done 2>/dev/null\n"
                        "kill -TERM $first $second 2>/dev/null\n"
                        "for job in $first $second; do wait $job; echo \"code $?\"; done\n",
                        command(folders, 1, "new/run", "--mesh dp=1 --check-steps 0 --steps 1000000"),
                        folders.run("first"), folders.run("second")));
  CAPTURE(outcome.output);
  const std::string one = read_file(folders.run("first")), other = read_file(folders.run("second"));
  const bool is_one_refused = contains(one, "train: another process is training in this folder: '");
  CAPTURE(last_line(is_one_refused ? other : one));
  CHECK(outcome.output == (is_one_refused ? "code 1\ncode 0\n" : "code 0\ncode 1\n"));
  CHECK(contains(is_one_refused ? one : other, "train: another process is training in this folder: '"));
  CHECK(contains(is_one_refused ? other : one, ", which is saved; --resume --run "));
  CHECK(!losses_of(folders, "new/run").empty());
}

TEST_CASE("train: a start that is refused leaves no folder and no lock") {
  const Folders folders;
  for (const char* arguments : {"--mesh dp=1 --resume", "--mesh dp=1 --data /nowhere"}) {
    CAPTURE(arguments);
    CHECK(outcome_of(folders, 1, "run", arguments).exit_code == 1);
    CHECK(!fs::exists(folders.run("run")));
  }
  fs::create_directories(folders.run("run"));
  CHECK(outcome_of(folders, 1, "run", "--mesh dp=1 --data /nowhere").exit_code == 1);
  CHECK(fs::exists(folders.run("run")));
  CHECK(fs::is_empty(folders.run("run")));
}

TEST_CASE("train: what is refused, and how") {
  const Folders folders;
  output_of(folders, 1, "run", "--mesh dp=1 --check-steps 0 --stop-at 2");
  struct Row {
    const char* why;
    int ranks;
    std::string arguments;
    std::string text;
  };
  const std::vector<Row> rows = {
      {"another run in the folder", 1, "--mesh dp=1", "has a run; give --resume to go on with it, or another --run"},
      {"another model", 2, "--mesh tp=2 --resume --layers 3", "has the model 'hidden 16, layers 2,"},
      {"another order of samples", 1, "--mesh dp=1 --resume --batch 4", "has the order of samples 'seed 1, batch 8'"},
      {"other data", 2, "--mesh dp=2 --resume --data " + folders.run("other"), "has the data '"},
      {"another number of ranks", 2, "--mesh dp=3 --resume", "--mesh dp=3,tp=1 has 3 ranks, but the job has 2"},
      {"no run to resume", 1, "--mesh dp=1 --resume --run " + folders.run("none"), "has no checkpoint"},
      {"no data", 2, "--mesh dp=2 --resume --data " + folders.run("none"), "is no folder"},
      {"a misspelled option", 2, "--mesh dp=2 --resum", "the options are"},
      {"fewer steps than are done", 1, "--mesh dp=1 --resume --steps 1", "--steps 1: the run in '"},
      {"parameters of another dtype", 1, "--mesh dp=1 --resume --dtype float64", "not tied, float64'"},
  };
  tessera::testing::write_text_folder(folders.run("other"), 12, /*seed=*/2);
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const ShellOutcome outcome = outcome_of(folders, row.ranks, "run", row.arguments);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(contains(outcome.output, row.text));
  }
  CHECK(losses_of(folders, "run").size() == 2);
}

TEST_CASE("train: on a terminal one line changes") {
  const Folders folders;
  // `script` runs its command on a pseudo-terminal; under tools/launch the program is told that there is one.
  const std::string alone = fmt::format(
      "examples/train/train --run {} --data {} --hidden 16 --layers 1 --heads 2 --sequence 16 --steps 3 --mesh dp=1 "
      "--check-steps 0 --validate-every 2",
      folders.run("alone"), folders.data);
  for (const std::string& text :
       {alone,
        command(folders, 2, "launched", "--mesh dp=2 --steps 3 --check-steps 0 --validate-every 2 --progress line")}) {
    const ShellOutcome outcome = shell("timeout 120 script -qefc '" + text + "' /dev/null");
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 0);
    const std::string up = "\x1b[1A\x1b[2K";
    CHECK(contains(outcome.output, up + "step 2/3  loss "));
    CHECK(contains(outcome.output, up + "after step 2: about "));
    CHECK(contains(outcome.output, up + "step 3/3  loss "));
    // The line of step 1 has not gone on to another one.
    CHECK(!contains(outcome.output, " left\r\nstep 2/3"));
  }
}

TEST_CASE("tools/train: a relative path of the data, in a file of options too, is one from the folder of the call") {
  const Checkout checkout;
  tessera::testing::write_text_folder(checkout.caller() + "/some text", 12);
  for (const char* quote : {"", "\""}) {
    std::ofstream(checkout.caller() + "/my options.ini")
        << "mesh = dp=2\ndata = " << quote << "some text" << quote << '\n';
    const ShellOutcome outcome = checkout.train("--config 'my options.ini' --stop-at 1 --check-steps 0");
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(contains(outcome.output, "data: 11 files"));
  }
  const std::vector<std::string> runs = checkout.runs();
  REQUIRE(runs.size() == 2);
  CHECK(contains(read_file(runs[0] + "/config.ini"), "data=\"" + checkout.caller() + "/some text\"\n"));
  // The folder of another call does not matter.
  const ShellOutcome resumed = shell("cd / && " + checkout.command("--resume --stop-at 2"));
  CAPTURE(resumed.output);
  CHECK(resumed.exit_code == 0);
  CHECK(contains(resumed.output, "goes on after step 1\n"));
}

TEST_CASE("tools/train: a start that fails leaves no folder below runs/") {
  const Checkout checkout;
  for (const char* arguments : {"--stepz 5", "--hidden 100 --heads 3", "--data nowhere", "--config nowhere.ini"}) {
    CAPTURE(arguments);
    const ShellOutcome outcome = checkout.train(arguments);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(contains(outcome.output, "train: "));
    CHECK(checkout.runs().empty());
  }
}

TEST_CASE("train: --dry-run prints bytes and collectives of any mesh in one process, and makes no folder") {
  const Folders folders;
  const std::string output = output_of(folders, 1, "run", "--dry-run --mesh dp=8,tp=4 --zero");
  for (const std::string part : {"plan on {dp: 8, tp: 4}", "ColwiseParallel", "bytes per rank", "rank 15",
                                 "and 16 ranks more", "collectives of a step: ", "reduce_scatter", "all_gather"}) {
    CAPTURE(part);
    CAPTURE(output);
    CHECK(contains(output, part));
  }
  CHECK(!fs::exists(folders.run("run")));
  CHECK(contains(output, "plan on {dp: 8, tp: 4} on cpu\n"));
  CHECK(contains(output_of(folders, 1, "run", "--dry-run --mesh dp=8 --device cuda"),
                 "plan on {dp: 8, tp: 1} on cuda\n"));
  // ZeRO-3 keeps pieces of gradients, but adds up whole ones while there are micro-batches.
  for (const bool accumulates : {false, true}) {
    CAPTURE(accumulates);
    const std::string bytes =
        output_of(folders, 1, "run",
                  fmt::format("--dry-run --mesh dp=8 --batch 16 --zero{}", accumulates ? " --accumulate 2" : ""));
    std::smatch row;
    REQUIRE(std::regex_search(bytes, row, std::regex("\nrank 0 +([0-9]+) +([0-9]+) ")));
    CHECK((std::stoll(row[2].str()) > 4 * std::stoll(row[1].str())) == accumulates);
  }
}
