// Checks that the benchmarks run: where several processes measure, the ranks and the peer's ranks get the same
// elements.

#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

using tessera::testing::shell;
using tessera::testing::ShellOutcome;

namespace {

const std::string kPeer = "bench/redistribute_peer.py";

ShellOutcome redistribute(const std::string& peer, const std::string& arguments) {
  // An edited peer is in another folder than the modules that it imports.
  return shell(
      "PYTHONPATH=bench TESSERA_PYTHON=$PYTHON timeout 200 bench/redistribute --quick --launch tools/launcher/launch "
      "--peer " +
      peer + " " + arguments);
}

std::string train(const std::string& peer) {
  return "PYTHONPATH=bench TESSERA_PYTHON=$PYTHON timeout 400 bench/train --quick --launch tools/launcher/launch "
         "--peer " +
         peer;
}

ShellOutcome tp_block(const std::string& peer, const std::string& arguments) {
  return shell(
      "PYTHONPATH=bench TESSERA_PYTHON=$PYTHON timeout 200 bench/tp_block --quick --launch tools/launcher/launch "
      "--peer " +
      peer + " " + arguments);
}

nlohmann::json read_json(const std::string& file) { return nlohmann::json::parse(std::ifstream(file)); }

// Returns the figures that a benchmark, which must succeed, writes.
nlohmann::json figures_of(const std::string& command) {
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/figures.json";
  const ShellOutcome outcome = shell(command + " --json " + file);
  CAPTURE(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return read_json(file);
}

}  // namespace

TEST_CASE("bench redistribute: every row is measured, ours and raw; the peer's where it has the redistribution") {
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/figures.json";
  const ShellOutcome outcome = redistribute(kPeer, "--json " + file);
  CAPTURE(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const nlohmann::json figures = read_json(file);
  REQUIRE(figures["rows"].size() == 24);
  const std::string refusal = "redistributing to Partial is for internal use only";
  for (const nlohmann::json& row : figures["rows"]) {
    const std::string name = row["name"];
    CAPTURE(name);
    CHECK(row["ours_us"] > 0);
    CHECK(row["raw_us"] > 0);
    const bool to_partial = name.ends_with(";P(sum)");  // the peer has no such target
    CHECK(row.contains("peer_us") == !to_partial);
    CHECK(row.contains("refused") == to_partial);
    if (to_partial) CHECK(row["refused"].get<std::string>().find(refusal) != std::string::npos);
    const bool is_local = name.find(";R;") != std::string::npos || to_partial;
    CHECK(row["communicates"] == !is_local);
  }
  CHECK(outcome.output.find("-: the peer refused 2 rows: Can not redistribute from ") != std::string::npos);
}

TEST_CASE("bench redistribute: a result in another order and an error that is no refusal end it") {
  struct Row {
    const char* why;
    const char* edit;  // sed's command on the peer
    const char* part;
  };
  const tessera::PrivateFolder folder;
  const std::string peer = folder.path() + "/peer.py";
  for (const Row& row : {Row{"another order", "s/made.run().to_local()/made.run().to_local().flip(0)/",
                             "2;8,8;S(0);R: on rank 0 ours has 64 elements of checksum "},
                         Row{"an error", "s/local = made.run().*/raise RuntimeError(\"no memory\")/", "no memory"}}) {
    CAPTURE(row.why);
    REQUIRE(shell(std::string("sed '") + row.edit + "' " + kPeer + " > " + peer).exit_code == 0);
    const ShellOutcome outcome = redistribute(peer, "--only '2;8,8;S(0);R'");
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(outcome.output.find(row.part) != std::string::npos);
  }
}

TEST_CASE("a benchmark of a row that is not there fails, rather than meet all goals") {
  const std::string dispatch =
      "TESSERA_PYTHON=$PYTHON timeout 200 bench/dispatch --check --peer bench/dispatch_peer.py --only nothing";
  for (const ShellOutcome& outcome : {shell(dispatch), redistribute(kPeer, "--check --only nothing"),
                                      shell(train("bench/train_peer.py") + " --check --only nothing")}) {
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(outcome.output.find("--only nothing: there is no such") != std::string::npos);
  }
}

TEST_CASE("bench redistribute: ranks that cannot start are reported") {
  const ShellOutcome outcome =
      shell("bench/redistribute --quick --launch /bin/false --peer bench/redistribute_peer.py");
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.find("ours: it ended before its ranks connected") != std::string::npos);
}

TEST_CASE("bench tp_block: four ways of one block give the same, and are measured") {
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/figures.json";
  const ShellOutcome outcome = tp_block("bench/tp_block_peer.py", "--json " + file);
  CAPTURE(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const nlohmann::json figures = read_json(file);
  CHECK(figures["benchmark"] == "tp_block");
  REQUIRE(figures["rows"].size() == 1);
  const nlohmann::json& row = figures["rows"][0];
  for (const char* way : {"hand_us", "styles_us", "layers_us", "peer_us"}) CHECK(row[way] > 0);
  for (const char* ratio : {"styles_to_hand", "layers_to_hand", "peer_to_styles", "peer_to_layers"}) {
    CAPTURE(ratio);
    const nlohmann::json& interval = row[std::string(ratio) + "_interval"];
    CHECK(interval[0] <= row[ratio]);
    CHECK(row[ratio] <= interval[1]);
  }
}

TEST_CASE("bench tp_block: a peer that computes something else ends it") {
  const tessera::PrivateFolder folder;
  const std::string peer = folder.path() + "/peer.py";
  REQUIRE(shell("sed 's/F.gelu/F.relu/' bench/tp_block_peer.py > " + peer).exit_code == 0);
  const ShellOutcome outcome = tp_block(peer, "");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.find("on rank 0 peer gives ") != std::string::npos);
}

TEST_CASE("bench train: three ways of each mesh have the same losses, and are measured") {
  const nlohmann::json figures = figures_of(train("bench/train_peer.py"));
  CHECK(figures["benchmark"] == "train");
  REQUIRE(figures["rows"].size() == 4);
  for (const nlohmann::json& row : figures["rows"]) {
    CAPTURE(row.dump());
    for (const char* way : {"hand_us", "ours_us", "peer_us"}) CHECK(row[way] > 0);
    CHECK(row["ours_to_hand_interval"][0] <= row["ours_to_hand"]);
    CHECK(row["peer_to_ours_interval"][0] <= row["peer_to_ours"]);
  }
}

TEST_CASE("bench train: a peer that trains something else ends it") {
  const tessera::PrivateFolder folder;
  const std::string peer = folder.path() + "/peer.py";
  REQUIRE(shell("sed 's/F.gelu/F.relu/' bench/train_peer.py > " + peer).exit_code == 0);
  const ShellOutcome outcome = shell(train(peer));
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.find("peer has the losses and norms ") != std::string::npos);
}

TEST_CASE("bench cross_entropy: three ways give the same loss, and ours keeps to the bound") {
  const nlohmann::json figures = figures_of(
      "TESSERA_PYTHON=$PYTHON timeout 200 bench/cross_entropy --quick --launch tools/launcher/launch --peer "
      "bench/cross_entropy_peer.py");
  CHECK(figures["benchmark"] == "cross_entropy");
  REQUIRE(figures["rows"].size() == 2);
  for (const nlohmann::json& row : figures["rows"]) {
    CAPTURE(row.dump());
    CHECK(row["of_bound"] > 0.99);
    CHECK(row["of_bound"] <= 1.05);
    for (const char* way : {"gather", "peer"}) {
      CHECK(row[std::string(way) + "_us"] > 0);
      CHECK(row[std::string(way) + "_peak_bytes"] > row["ours_peak_bytes"]);
    }
  }
}

TEST_CASE("bench generate: ranks and one process write the same tokens, and are measured") {
  const nlohmann::json figures = figures_of("timeout 200 bench/generate --quick --launch tools/launcher/launch");
  CHECK(figures["benchmark"] == "generate");
  REQUIRE(figures["rows"].size() == 2);
  for (const nlohmann::json& row : figures["rows"]) {
    CHECK(row["ranks_us"] > 0);
    CHECK(row["plain_us"] > 0);
    CHECK(row["to_plain_interval"][0] <= row["to_plain"]);
  }
}

TEST_CASE("bench checkpoint: both sides save and load, and what an asynchronous save costs is measured") {
  const tessera::PrivateFolder folder;
  const nlohmann::json figures = figures_of(
      "TESSERA_PYTHON=$PYTHON timeout 200 bench/checkpoint --quick --launch tools/launcher/launch --peer "
      "bench/checkpoint_peer.py --folder " +
      folder.path());
  CHECK(figures["benchmark"] == "checkpoint");
  REQUIRE(figures["rows"].size() == 3);
  for (const nlohmann::json& row : figures["rows"]) {
    CAPTURE(row.dump());
    CHECK(row["bytes"] == 2 * 3 * 1024 * 1024 * 4);
    for (const char* figure : {"save_us", "load_us", "cp_us", "peer_save_us", "peer_load_us", "start_us", "copy_us"})
      CHECK(row[figure] > 0);
    // A rank holds what it writes once more while it is written.
    const double share = row["bytes"].get<double>() / 2;
    CHECK(row["peak_bytes"] >= row["held_bytes"].get<double>() + share);
    CHECK(row["peak_bytes"] < row["held_bytes"].get<double>() + 2.1 * share);
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("bench sequence_memory: by layers a rank keeps its part of what one process keeps") {
  const nlohmann::json figures = figures_of("timeout 100 bench/sequence_memory --quick");
  REQUIRE(figures["rows"].size() == 1);
  const nlohmann::json& row = figures["rows"][0];
  CHECK(row["layers_ratio"] <= 1.02);
  CHECK(row["layers_ratio"] > 0.98);
  CHECK(row["styles_ratio"] > 0.98);
}

TEST_CASE("bench overlap: a step is measured with and without a delay") {
  const nlohmann::json figures = figures_of("timeout 100 bench/overlap --quick");
  REQUIRE(figures["rows"].size() == 4);
  for (const nlohmann::json& row : figures["rows"]) CHECK(row["step_us"] > 0);
}

TEST_CASE("bench dispatch: ours and the peer's are measured") {
  const nlohmann::json figures = figures_of(
      "TESSERA_PYTHON=$PYTHON timeout 200 bench/dispatch --rounds 1 --calls 2 --only add --peer "
      "bench/dispatch_peer.py");
  CHECK(figures["benchmark"] == "dispatch");
  REQUIRE(figures["rows"].size() == 1);
  CHECK(figures["rows"][0]["name"] == "add");
  for (const char* figure : {"ours_us", "plain_us", "peer_us", "peer_plain_us"}) CHECK(figures["rows"][0][figure] > 0);
}

TEST_CASE("bench plan_quality: every plan is the cheapest, and the time of planning is reported") {
  const nlohmann::json figures =
      figures_of("timeout 200 bench/plan_quality --pairs-3d 2 --pairs-64 2 --timed 1 --large 1");
  CHECK(figures["benchmark"] == "plan_quality");
  int optimum = 0, planning = 0, large = 0;
  for (const nlohmann::json& row : figures["rows"]) {
    const std::string name = row["name"];
    CAPTURE(name);
    if (name.starts_with("optimum ")) {
      ++optimum;
      CHECK(row["off"] == 0);
    } else {
      ++(name.starts_with("large ") ? large : planning);
      CHECK(row["ours_us"] > 0);
    }
  }
  CHECK(optimum == 19 * 6);  // settings times cost models
  CHECK(planning == 3 * 6);
  CHECK(large == 5 * 3 * 2);  // meshes, tensors and cost models
}

TEST_CASE("bench mesh: a mesh of 4,096 ranks is built, and makes no process group") {
  const ShellOutcome outcome = shell("timeout 100 bench/mesh");
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.output.find("coordinate_of") != std::string::npos);
  CHECK(outcome.output.find("process groups made: 0") != std::string::npos);
}
