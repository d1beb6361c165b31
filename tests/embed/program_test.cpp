// The program as a user starts it: by tools/launch, by torchrun and by mpirun.

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/harness/over_mpi.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tools/launcher/private_folder.h"

using tessera::testing::contains;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;
using tessera::testing::why_no_mpi;

namespace {

const std::string kLaunch = "timeout 120 tools/launcher/launch --no-prefix -n ";

// The program with its weights and vocabulary.
std::string program(const std::string& more = "") {
  const std::string model = std::getenv("MINILM");
  return fmt::format(" examples/embed/embed --weights {0} --vocab {0}/vocab.txt {1}", model, more);
}

std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

void check_success(const ShellOutcome& outcome) {
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(std::regex_match(last_line(outcome.output), std::regex("largest difference from one process: [0-9.e-]+")));
}

}  // namespace

TEST_CASE("embed on 4 ranks prints everything once and ends with the difference from one process") {
  const ShellOutcome outcome = shell(kLaunch + "4" + program());
  check_success(outcome);
  CAPTURE(outcome.output);
  for (const std::string part :
       {"plan on {tp: 4} on cpu\n", "encoder.layer.*.attention.self.query", "ColwiseParallel", "100%",
        "weights on rank 0\n", "embeddings.word_embeddings", "[30522, 384]", "[7631, 384]", "weight bytes\n", "rank 3",
        "collectives of one forward: 13\n", "all_reduce", "similarities\n", "the nearest sentence to each\n",
        "The cat is sleeping on the warm windowsill."}) {
    CAPTURE(part);
    CHECK(contains(outcome.output, part));
  }
  CHECK(outcome.output.find("plan on") == outcome.output.rfind("plan on"));
}

TEST_CASE("embed --text: a sentence a line, empty lines left out, line ends of either kind") {
  const tessera::PrivateFolder folder;
  const std::string path = folder.path() + "/text";
  std::ofstream(path) << "Rain is falling.\r\n\r\n  \nIt is a wet day.\r\nTaxes are due in April.\n";
  const ShellOutcome outcome = shell(kLaunch + "3" + program("--text " + path));
  check_success(outcome);
  CHECK(contains(outcome.output, "Rain is falling.         ->  It is a wet day."));
  CHECK(outcome.output.find('\r') == std::string::npos);
}

TEST_CASE("embed --text of many sentences: several forwards, and no table of all pairs") {
  const tessera::PrivateFolder folder;
  const std::string path = folder.path() + "/text";
  {
    std::ofstream file(path);
    for (int i = 0; i < 70; ++i) file << "Sentence number " << i << (i % 2 == 0 ? ".\n" : " is about the rain.\n");
  }
  const ShellOutcome outcome = shell(kLaunch + "2" + program("--text " + path));
  check_success(outcome);
  CHECK(contains(outcome.output, "collectives of 2 forwards: 26\n"));
  CHECK_FALSE(contains(outcome.output, "similarities\n"));
  CHECK(contains(outcome.output, "the nearest sentence to each\n"));
}

TEST_CASE("embed alone is a job of one process: no collectives, no difference") {
  const ShellOutcome outcome = shell("timeout 120" + program());
  check_success(outcome);
  CHECK(contains(outcome.output, "collectives of one forward: 0\n"));
}

TEST_CASE("embed: mistakes are named, and the job ends") {
  struct Row {
    std::string why;
    std::string command;
    std::string want;
  };
  const tessera::PrivateFolder folder;
  const std::string empty = folder.path() + "/empty";
  std::ofstream(empty) << "\n";
  const std::vector<Row> rows = {
      {"heads", kLaunch + "5" + program(), "12 attention heads do not divide over 5 ranks; start 1, 2, 3, 4, 6 or 12"},
      {"no text", kLaunch + "2" + program("--text no/such/file"), "--text: cannot read 'no/such/file'"},
      {"a folder", kLaunch + "2" + program("--text " + folder.path()), "' is a folder; name a file of sentences"},
      {"no sentence", kLaunch + "2" + program("--text " + empty), "has no sentence; write one per line"},
      {"no weights", kLaunch + "2 examples/embed/embed --vocab x", "--weights is required"},
      {"weights that are not there", kLaunch + "2" + program("--weights no/such.safetensors --text " + empty + "2"),
       "no/such"},
  };
  std::ofstream(empty + "2") << "A sentence.\n";
  for (const Row& row : rows) {
    const ShellOutcome outcome = shell(row.command);
    CAPTURE(row.why);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code != 0);
    CHECK(outcome.exit_code != 124);
    CHECK(contains(outcome.output, row.want));
  }
}

TEST_CASE("torchrun --no-python starts embed on 2 ranks") {
  const std::string torchrun =
      std::string(std::getenv("PYTHON")) + " -m torch.distributed.run --no-python --nproc_per_node=2";
  check_success(shell("timeout 120 " + torchrun + program()));
}

TEST_CASE("mpirun starts embed on 2 ranks, over Gloo and over MPI") {
  if (shell("command -v mpirun").exit_code != 0)
    TESSERA_SKIP_MISSING("mpirun is not installed; apt-get install openmpi-bin");
  const std::string mpirun = " timeout 120 mpirun --allow-run-as-root --oversubscribe -np 2";
  check_success(shell("TESSERA_BACKEND=gloo" + mpirun + program()));
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  check_success(shell("TESSERA_BACKEND=mpi" + mpirun + program()));
}

TEST_CASE("launch --backend mpi: embed on 4 ranks prints the same line of difference") {
  if (!why_no_mpi().empty()) TESSERA_SKIP_MISSING(why_no_mpi());
  check_success(shell(kLaunch + "4 --backend mpi" + program()));
}
