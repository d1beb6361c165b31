#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/examples/train/options.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

using train::Options;
using train::Parsed;

Parsed parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "train");
  return train::parse_options(static_cast<int>(arguments.size()), arguments.data());
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Makes a run's folder with the config.ini of these arguments.
void begin_run(const std::string& run, const std::vector<const char*>& arguments) {
  std::filesystem::create_directories(run);
  std::ofstream(run + "/config.ini") << parse(arguments).config;
}

}  // namespace

TEST_CASE("options: defaults, and a mesh in any order and with one dimension") {
  const Options options = parse({}).options;
  CHECK(options.dp == 2);
  CHECK(options.tp == 2);
  CHECK(options.hidden == 128);
  CHECK(options.sequence == 128);
  CHECK(options.dropout == 0.1);
  CHECK(options.zero == 0);
  CHECK(options.device == "cpu");
  CHECK(parse({"--device", "cuda"}).options.device == "cuda");
  CHECK(parse({"--zero"}).options.zero == 3);
  CHECK(parse({"--zero", "--tied"}).options.zero == 3);
  CHECK(parse({"--zero=0"}).options.zero == 0);
  CHECK(parse({"--zero=1", "--zero=2"}).options.zero == 2);
  CHECK(parse({"--zero", "--zero=0"}).options.zero == 0);
  CHECK(parse({"--zero", "--zero"}).options.zero == 3);
  CHECK(parse({"--steps", "010"}).options.steps == 10);
  CHECK(parse({"--warm-up", "00"}).options.warm_up == 0);
  const std::vector<const char*> stages = {"--zero=1", "--zero=2", "--zero=3"};
  for (std::size_t i = 0; i < stages.size(); ++i) {
    CHECK(parse({stages[i]}).options.zero == static_cast<int64_t>(i) + 1);
  }
  const Options mesh = parse({"--mesh", "tp=4,dp=3"}).options;
  CHECK(mesh.dp == 3);
  CHECK(mesh.tp == 4);
  CHECK(parse({"--mesh=tp=4"}).options.dp == 1);
  CHECK(parse({"--mesh", "dp=4"}).options.tp == 1);
}

TEST_CASE("options: a wrong one is answered with the right ones") {
  struct Row {
    std::vector<const char*> arguments;
    std::vector<std::string> parts;
  };
  const std::vector<Row> rows = {
      {{"--resum"}, {"--resum", "the options are", "--resume", "--accumulate"}},
      {{"more"}, {"more", "the options are", "--mesh"}},
      {{"--dtype", "int8"}, {"--dtype", "int8", "auto", "float64", "float32", "bfloat16"}},
      {{"--mesh", "pp=2"}, {"'pp=2'", "dp, which cuts the batch, and tp, which cuts the layers"}},
      {{"--mesh", "dp=2,dp=2"}, {"each at most once"}},
      {{"--mesh", "dp=0"}, {"at least 1 rank"}},
      {{"--mesh", "dp=2x"}, {"'dp=2x' is no mesh"}},
      {{"--mesh", ""}, {"the mesh is empty"}},
      {{"--device", "tpu"}, {"--device", "tpu", "cpu", "cuda"}},
      {{"--zero=4"}, {"--zero", "4", "0,1,2,3"}},
      {{"--hidden", "100", "--heads", "3"}, {"--heads 3 does not divide --hidden 100"}},
      {{"--accumulate", "3"}, {"--accumulate 3 does not divide --batch"}},
      {{"--dropout", "1.5"}, {"--dropout", "1.5", "0.99"}},
      {{"--steps", "0"}, {"--steps"}},
      {{"--steps", ""}, {"--steps"}},
      {{"--steps", "many"}, {"--steps", "many"}},
      {{"--config", "/nowhere/x.ini"}, {"/nowhere/x.ini"}},
      {{"--clip", "nan"}, {"--clip", "is nan"}},
      {{"--data", "/corpora/C#"}, {"--data '/corpora/C#': config.ini cannot hold a path with #"}},
  };
  for (const Row& row : rows) {
    const Parsed parsed = parse(row.arguments);
    CAPTURE(row.arguments.front());
    CAPTURE(parsed.message);
    CHECK(parsed.exit_code == std::optional<int>(1));
    for (const std::string& part : row.parts) {
      CAPTURE(part);
      CHECK(contains(parsed.message, part));
    }
  }
  const Parsed help = parse({"--help"});
  CHECK(help.exit_code == std::optional<int>(0));
  CHECK(contains(help.message, "--activation-checkpoint"));
}

TEST_CASE("options: a config file gives the same options, and gives way to the command line") {
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/config.ini";
  begin_run(folder.path(), {"--mesh", "dp=4", "--zero", "--tied", "--hidden", "64", "--learning-rate", "0.0025",
                            "--activation-checkpoint", "--data", "/a folder/of text", "--dtype", "float32"});
  const Options read = parse({"--config", file.c_str(), "--hidden", "32"}).options;
  CHECK(read.dp == 4);
  CHECK(read.tp == 1);
  CHECK(read.zero == 3);
  CHECK(read.is_tied);
  CHECK(read.has_activation_checkpoints);
  CHECK(read.hidden == 32);
  CHECK(read.learning_rate == 0.0025);
  CHECK(read.data == "/a folder/of text");
  CHECK(read.dtype == "float32");
  std::ofstream(file, std::ios::app) << "hiden=3\n";
  const Parsed wrong = parse({"--config", file.c_str()});
  CHECK(wrong.exit_code == std::optional<int>(1));
  CHECK(contains(wrong.message, "'" + file + "' has 'hiden', which is no option; correct its name"));
  CHECK(contains(wrong.message, "the options are"));
}

TEST_CASE("options: what is wrong with a config file is answered with the file, the line and what to do") {
  struct Row {
    std::string text;
    std::string part;
  };
  const std::vector<Row> rows = {
      {"steps=3\nstepz=5\n", "has 'stepz', which is no option; correct its name, or remove its line\nthe options are"},
      {"=500\n", "has a line that begins with '='; write an option before it"},
      {"resume=true\n",
       "has 'resume', which such a file cannot give; remove its line, and give --resume to the program"},
      {"[model]\nhidden=64\n", "has the section [model], but options stand in no section; remove that line"},
      {"model.hidden=64\n", "has 'model.hidden', which is no option"},
  };
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/some.ini";
  for (const Row& row : rows) {
    CAPTURE(row.text);
    std::ofstream(file) << row.text;
    const Parsed parsed = parse({"--config", file.c_str()});
    CAPTURE(parsed.message);
    CHECK(parsed.exit_code == std::optional<int>(1));
    CHECK(contains(parsed.message, "train: '" + file + "' " + row.part));
  }
}

TEST_CASE("options: a relative path of the data is one from the folder of the call, and is saved whole") {
  const tessera::PrivateFolder folder;
  const std::string file = folder.path() + "/config.ini", here = std::filesystem::current_path().string();
  const Parsed given = parse({"--data", "some/../a text"});
  CHECK(given.options.data == here + "/a text");
  CHECK(contains(given.config, "data=\"" + here + "/a text\"\n"));
  for (const char* line : {"data=a text, and more", "data = \"a text, and more\""}) {
    CAPTURE(line);
    std::ofstream(file) << line << "\nmesh=dp=2,tp=3\n";
    const Options read = parse({"--config", file.c_str()}).options;
    CHECK(read.data == here + "/a text, and more");
    CHECK(read.dp == 2);
    CHECK(read.tp == 3);
  }
  CHECK(parse({}).options.data.empty());
  std::ofstream(file) << parse({}).config;
  CHECK(parse({"--config", file.c_str()}).options.data.empty());
}

TEST_CASE("options: a run goes on with the options that it was begun with, and with others where they are given") {
  const tessera::PrivateFolder folder;
  begin_run(folder.path(), {"--layers", "2", "--batch", "8", "--device", "cuda"});
  const Parsed again = parse({"--run", folder.path().c_str(), "--resume", "--batch", "4"});
  CAPTURE(again.message);
  const Options& resumed = again.options;
  CHECK(resumed.is_resumed);
  CHECK(resumed.layers == 2);
  CHECK(resumed.batch == 4);
  CHECK(resumed.device == "cuda");
  CHECK(parse({"--run", folder.path().c_str(), "--resume", "--device", "cpu"}).options.device == "cpu");
  CHECK(parse({"--run", folder.path().c_str()}).options.layers == 4);
}
