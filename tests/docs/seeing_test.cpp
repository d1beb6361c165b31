// Holds the code of docs/seeing.md that communicates, and compares the page's pictures with new ones.

#include <fstream>
#include <iostream>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/core/modes.h"
#include "tessera/inspect/timeline.h"
#include "tessera/inspect/trace.h"
#include "tessera/mesh/core/log.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/mlp.h"
#include "tessera/tests/ground/source_tree.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/shell.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  CAPTURE(path);
  REQUIRE(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

// Returns the names of lanes and ranks in a time line: its texts outside the bars.
std::set<std::string> lanes_in(const std::string& svg) {
  std::set<std::string> lanes;
  const std::regex text(">(rank [0-9]+|spans|modules|operators|collectives on [^<]+)</text>");
  for (std::sregex_iterator it(svg.begin(), svg.end(), text), end; it != end; ++it) lanes.insert((*it)[1]);
  return lanes;
}

std::string logged;

void my_log(const char* kind, const std::string& text) { logged += std::string(kind) + ": " + text + "\n"; }

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/seeing.md: a trace and a time line of a few steps", {1, 2}) {
  const tessera::DeviceMesh mesh =
      tessera::init_device_mesh("cpu", {tessera::testing::world_size()}, {"tp"}, tessera::testing::world());
  Mlp model;
  auto tp = tessera::parallelize_module(model, mesh,
                                        {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
  torch::optim::AdamW optimizer(model->parameters());
  const at::Tensor input = torch::ones({8, 16});

  for (int step = 0; step < 3; ++step) {
    const tessera::Recorder::Span span(mesh.world().recorder(), "step");
    tp(input).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  tessera::write_trace(mesh, "trace.json");

  const std::vector<tessera::Record> records = tessera::gather_records(mesh);  // empty but on the first rank
  const std::string svg = tessera::timeline_svg(records, {.title = "three steps on two ranks"});

  std::cout << tessera::to_string(tessera::collective_totals(mesh.world().recorder().records()));
  std::cout << tessera::to_string(tessera::late_ranks(records));
  std::cerr << tessera::to_string(mesh.world().recorder().records(/*most=*/20));

  CHECK(mesh.world().recorder().records(20).size() == 20);
  if (tessera::testing::rank() != 0) {
    CHECK(records.empty());
    return;
  }
  CHECK(nlohmann::json::parse(text_of("trace.json")).at("traceEvents").size() > 100);
  CHECK(tessera::late_ranks(records).size() == (tessera::testing::world_size() == 1 ? 0 : 2));
  int steps = 0;
  for (const tessera::Record& record : records) steps += record.name == "step" ? 1 : 0;
  CHECK(steps == 3 * tessera::testing::world_size());
  CHECK(svg.find(">step</text>") != std::string::npos);
}

TEST_CASE("docs/seeing.md: the pictures are those that are made now") {
  const tessera::PrivateFolder folder;
  const tessera::testing::ShellOutcome outcome = tessera::testing::shell("tests/docs/pictures " + folder.path());
  CAPTURE(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const std::string pictures = tessera::testing::source_root() / "docs/pictures";
  const std::string how = "make it again: bazel run //tests/docs:pictures -- $PWD/docs/pictures";
  for (const char* name : {"/layout.svg", "/plan.svg"}) {
    CHECK_MESSAGE(text_of(pictures + name) == text_of(folder.path() + name), how);
  }
  // The times of the third one differ from run to run.
  const std::set<std::string> lanes = lanes_in(text_of(folder.path() + "/timeline.svg"));
  CHECK(lanes.size() == 6);
  CHECK_MESSAGE(lanes == lanes_in(text_of(pictures + "/timeline.svg")), how);
}

TEST_CASE("docs/seeing.md: a program takes what the library logs") {
  const tessera::WarnImplicit guard;
  tessera::set_log_sink([](tessera::LogLevel level, const std::string& text) {
    my_log(level >= tessera::LogLevel::kWarning ? "warning" : "note", text);
  });
  tessera::WarnImplicit::warn("said once");
  tessera::set_log_sink({}, tessera::LogLevel::kDebug);
  tessera::set_log_sink({});
  tessera::WarnImplicit::warn("goes to the standard error stream");
  CHECK(logged == "warning: said once\n");
}
