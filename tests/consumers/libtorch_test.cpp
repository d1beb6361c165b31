// Configures a CMake project against folders that look like LibTorch to TesseraConfig.cmake: which of them it takes,
// and which it refuses.

#include <string>

#include <doctest/doctest.h>
#include <torch/headeronly/version.h>

#include "tessera/tests/consumers/installation.h"
#include "tessera/version.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing::Installation;
using tessera::testing::ShellOutcome;
using tessera::testing::write_text;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

constexpr const char* kNewAbi = "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringE";

// Makes the files of a LibTorch that TesseraConfig.cmake looks at.
fs::path make_libtorch(const fs::path& folder, int major, int minor, int patch, const char* symbol = kNewAbi) {
  write_text(folder / "include/torch/headeronly/version.h",
             "#define TORCH_VERSION_MAJOR " + std::to_string(major) + "\n#define TORCH_VERSION_MINOR " +
                 std::to_string(minor) + "\n#define TORCH_VERSION_PATCH " + std::to_string(patch) + "\n");
  write_text(folder / "include/torch/csrc/api/include/torch/torch.h", "");
  write_text(folder / "lib/libtorch_cpu.so", "");
  write_text(folder / "lib/libtorch_cuda.so", "");
  write_text(folder / "lib/libc10.so", symbol + std::string(1, '\0'));
  write_text(folder / "share/cmake/Torch/TorchConfig.cmake", "message(FATAL_ERROR \"this file is not to be read\")\n");
  return folder;
}

fs::path make_right_libtorch(const fs::path& folder) {
  return make_libtorch(folder, TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, TORCH_VERSION_PATCH);
}

// Makes a python3 that knows a torch package, and returns its folder.
fs::path make_python(const fs::path& folder, const fs::path& torch) {
  write_text(folder / "python3", "#!/bin/sh\necho '" + torch.string() + "'\n");
  fs::permissions(folder / "python3", fs::perms::owner_all);
  return folder;
}

// Configures a project that only finds Tessera, with `environment` before the command and `arguments` behind it.
class Project {
 public:
  Project() { write("find_package(Tessera REQUIRED)\n"); }

  // Writes a project that has these lines.
  void write(const std::string& lines) const {
    write_text(folder() / "CMakeLists.txt",
               "cmake_minimum_required(VERSION 3.21)\nproject(x LANGUAGES C CXX)\nenable_testing()\n" + lines);
  }

  fs::path folder() const { return installation_.home() / "project"; }
  fs::path beside(const std::string& name) const { return installation_.home() / name; }

  ShellOutcome configure(const std::string& environment, const std::string& arguments) const {
    // The build folder keeps what CMake knows of the compiler, and forgets all else.
    return run(environment +
               "\ncmake -S . -B build -U'TESSERA_*' -U'T*_DIR' -UCMAKE_PREFIX_PATH "
               "-DTessera_DIR=\"$HOME/tessera/lib/cmake/Tessera\" " +
               arguments);
  }

  // Runs lines of bash where no LibTorch of this machine is found: neither that of tools/setup nor that of a Python.
  ShellOutcome run(const std::string& lines) const {
    return installation_.run(folder(),
                             "unset TESSERA_LIBTORCH\n"
                             "export XDG_CACHE_HOME=~/cache PATH=~/python:/usr/bin:/bin\n" +
                                 lines);
  }

  // Returns what CMake says when the build folder is configured once more, with nothing of it forgotten.
  std::string configure_again(const std::string& arguments) const {
    return run("cmake " + arguments + " build").output;
  }

  void check_takes(const std::string& environment, const std::string& arguments, const fs::path& folder) const {
    const ShellOutcome outcome = configure(environment, arguments);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(contains(outcome.output, "uses LibTorch " TORCH_VERSION " of " + folder.string() + "\n"));
  }

  void check_refuses(const std::string& environment, const std::string& arguments, const std::string& text) const {
    const ShellOutcome outcome = configure(environment, arguments);
    CAPTURE(outcome.output);
    CHECK(outcome.exit_code != 0);
    std::string words = outcome.output;  // CMake breaks lines
    for (std::size_t at; (at = words.find_first_of("\n")) != std::string::npos;) words.replace(at, 1, " ");
    for (std::size_t at; (at = words.find("  ")) != std::string::npos;) words.erase(at, 1);
    CHECK(contains(words, text));
  }

 private:
  Installation installation_;
};

}  // namespace

TEST_CASE("consumers: a LibTorch that is given is taken, in the order that the page states") {
  const Project project;
  const fs::path by_name = make_right_libtorch(project.beside("by_name"));
  const fs::path by_variable = make_right_libtorch(project.beside("by_variable"));
  const fs::path by_torch_dir = make_right_libtorch(project.beside("by_torch_dir"));
  const fs::path by_prefix = make_right_libtorch(project.beside("by_prefix"));
  make_python(project.beside("python"), make_right_libtorch(project.beside("by_python")));
  std::string environment, arguments = "-DCMAKE_PREFIX_PATH=" + by_prefix.string();
  project.check_takes(environment, arguments, by_prefix);
  project.check_takes(environment, arguments + "/share/cmake", by_prefix);
  arguments += " -DTorch_DIR=" + (by_torch_dir / "share/cmake/Torch").string();
  project.check_takes(environment, arguments, by_torch_dir);
  environment = "export TESSERA_LIBTORCH=" + by_variable.string();
  project.check_takes(environment, arguments, by_variable);
  project.check_takes(environment, arguments + " -DTESSERA_LIBTORCH=" + by_name.string(), by_name);
  project.check_takes(environment, arguments + " -DTESSERA_LIBTORCH=../by_name", by_name);
}

TEST_CASE("consumers: a build folder remembers the LibTorch that it has taken, while that has the right version") {
  const Project project;
  const fs::path first = make_right_libtorch(project.beside("first"));
  const fs::path second = make_right_libtorch(project.beside("second"));
  const fs::path third = make_right_libtorch(project.beside("third"));
  project.check_takes("export TESSERA_LIBTORCH=" + first.string(), "", first);
  CHECK(contains(project.configure_again(""), "of " + first.string() + "\n"));
  CHECK(contains(project.configure_again("-DCMAKE_PREFIX_PATH=" + second.string()), "of " + first.string() + "\n"));
  make_libtorch(first, 2, 9, 1);
  CHECK(contains(project.configure_again(""), "of " + second.string() + "\n"));
  CHECK(contains(project.configure_again("-DTorch_DIR=" + third.string() + "/share/cmake/Torch"),
                 "of " + third.string() + "\n"));
}

TEST_CASE("consumers: a LibTorch without CUDA is refused where Tessera was built for CUDA") {
  const Project project;
  const fs::path file = project.beside("tessera/lib/cmake/Tessera/TesseraLibTorch.cmake");
  std::string text = tessera::testing::read_text(file);
  const std::string off = "set(TESSERA_LIBTORCH_CUDA OFF)";
  if (const std::size_t at = text.find(off); at != std::string::npos) {
    text.replace(at, off.size(), "set(TESSERA_LIBTORCH_CUDA ON)");
  }
  REQUIRE(contains(text, "set(TESSERA_LIBTORCH_CUDA ON)"));
  write_text(file, text);
  const fs::path torch = make_right_libtorch(project.beside("torch"));
  project.check_takes("", "-DTESSERA_LIBTORCH=" + torch.string(), torch);
  fs::remove(torch / "lib/libtorch_cuda.so");
  project.check_refuses("", "-DTESSERA_LIBTORCH=" + torch.string(),
                        torch.string() + " has LibTorch " TORCH_VERSION " without CUDA; set");
}

TEST_CASE("consumers: the LibTorch of an earlier find_package(Torch) is taken") {
  const Project project;
  const fs::path torch = make_right_libtorch(project.beside("torch"));
  project.write(
      "add_library(torch_cpu SHARED IMPORTED)\n"
      "set_target_properties(torch_cpu PROPERTIES IMPORTED_LOCATION " +
      torch.string() + "/lib/libtorch_cpu.so)\nfind_package(Tessera REQUIRED)\n");
  project.check_takes("", "-DTorch_DIR=" + project.beside("nothing").string(), torch);
}

TEST_CASE("consumers: without one that is given, the first LibTorch of the right version is taken") {
  const Project project;
  const std::string hash =
      tessera::testing::shell("sha256sum tools/requirements.txt | cut -c1-16 | tr -d '\\n'").output;
  const std::string torch_of_setup = "tessera/" + hash + "/lib/python3.11/site-packages/torch";
  project.check_refuses("", "", "libtessera was built with LibTorch " TORCH_VERSION "; set TESSERA_LIBTORCH to");
  make_python(project.beside("python"), make_libtorch(project.beside("by_python"), 2, 9, 1));
  project.check_refuses("", "",
                        "built with LibTorch " TORCH_VERSION "; " + project.beside("by_python").string() +
                            " has LibTorch 2.9.1; set TESSERA_LIBTORCH to");
  const std::string empty = "export XDG_CACHE_HOME= TESSERA_LIBTORCH= Torch_DIR= CMAKE_PREFIX_PATH=";
  project.check_takes(empty, "", make_right_libtorch(project.beside(".cache/" + torch_of_setup)));
  project.check_takes("", "", make_right_libtorch(project.beside("cache/" + torch_of_setup)));
  const fs::path by_python = make_right_libtorch(project.beside("by_python"));
  project.check_takes("", "", by_python);
}

TEST_CASE("consumers: a LibTorch of another version, of another ABI or without files is refused, with both versions") {
  const Project project;
  make_python(project.beside("python"), make_right_libtorch(project.beside("by_python")));
  const fs::path newer = make_libtorch(project.beside("newer"), 2, 12, 1);
  const std::string text =
      "libtessera was built with LibTorch " TORCH_VERSION "; " + newer.string() + " has LibTorch 2.12.1; set";
  project.check_refuses("", "-DTESSERA_LIBTORCH=" + newer.string(), text);
  project.check_refuses("export TESSERA_LIBTORCH=" + newer.string(), "", text);
  project.check_refuses("", "-DTorch_DIR=" + newer.string() + "/share/cmake/Torch", text);
  project.check_refuses("", "-DCMAKE_PREFIX_PATH=" + newer.string(), text);

  const fs::path patched =
      make_libtorch(project.beside("patched"), TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, TORCH_VERSION_PATCH + 1);
  project.check_refuses("", "-DTESSERA_LIBTORCH=" + patched.string(),
                        "has LibTorch " + std::to_string(TORCH_VERSION_MAJOR));

  const fs::path old_abi = make_libtorch(project.beside("old_abi"), TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR,
                                         TORCH_VERSION_PATCH, "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs");
  project.check_refuses("", "-DTESSERA_LIBTORCH=" + old_abi.string(), "was compiled with _GLIBCXX_USE_CXX11_ABI=0");
  project.check_refuses("", "-DTESSERA_LIBTORCH=" + project.beside("nothing").string(),
                        "/nothing has no LibTorch; set");
}

TEST_CASE("consumers: a version of Tessera that is incompatible is refused, and so is an unknown component") {
  const Project project;
  const fs::path torch = make_right_libtorch(project.beside("torch"));
  struct Row {
    std::string wanted;
    std::string text;
  };
  const std::string abi = std::to_string(TESSERA_VERSION_MAJOR) + "." + std::to_string(TESSERA_VERSION_MINOR);
  const std::string next = std::to_string(TESSERA_VERSION_MAJOR) + "." + std::to_string(TESSERA_VERSION_MINOR + 1);
  const Row rows[] = {{TESSERA_VERSION, "found: 1"},
                      {abi, "found: 1"},
                      {TESSERA_VERSION " EXACT", "found: 1"},
                      {abi + "." + std::to_string(TESSERA_VERSION_PATCH + 1), "found: 0"},
                      {next, "found: 0"},
                      {std::to_string(TESSERA_VERSION_MAJOR), "found: 1"},
                      {std::to_string(TESSERA_VERSION_MAJOR + 1), "found: 0"},
                      {"0.0..." + next, "found: 1"},
                      {"0.0...<" TESSERA_VERSION, "found: 0"},
                      {"0.0..." TESSERA_VERSION, "found: 1"},
                      {next + "...99.0", "found: 0"},
                      {"REQUIRED COMPONENTS engine", "there is no component engine; there is harness"}};
  for (const Row& row : rows) {
    CAPTURE(row.wanted);
    project.write("find_package(Tessera " + row.wanted + ")\nmessage(STATUS \"found: ${Tessera_FOUND}\")\n");
    const ShellOutcome outcome = project.configure("", "-DTESSERA_LIBTORCH=" + torch.string());
    CAPTURE(outcome.output);
    CHECK(contains(outcome.output, row.text));
  }
}

TEST_CASE("consumers: without doctest Tessera is found, and the harness is not, unless it is required") {
  const Project project;
  const fs::path torch = make_right_libtorch(project.beside("torch"));
  struct Row {
    std::string doctest;
    std::string components;
    std::string text;
  };
  const Row rows[] = {{"/usr/include", "OPTIONAL_COMPONENTS harness engine", "found: 1 TRUE FALSE"},
                      {"/nowhere", "OPTIONAL_COMPONENTS harness", "found: 1 FALSE "},
                      {"/nowhere", "OPTIONAL_COMPONENTS harness", "found was: none in /nowhere; set TESSERA_DOCTEST"},
                      {"/nowhere", "COMPONENTS harness", "found: 0 FALSE "}};
  for (const Row& row : rows) {
    CAPTURE(row.components);
    project.write("find_package(Tessera " + row.components +
                  ")\nmessage(STATUS \"found: ${Tessera_FOUND} ${Tessera_harness_FOUND} ${Tessera_engine_FOUND}\")\n");
    const ShellOutcome outcome =
        project.configure("", "-DTESSERA_LIBTORCH=" + torch.string() + " -DTESSERA_DOCTEST_INCLUDE=" + row.doctest);
    CAPTURE(outcome.output);
    CHECK(contains(outcome.output, row.text));
  }
}

TEST_CASE("consumers: a test of ranks runs over each backend by its name, and its C sources are compiled as C") {
  const Project project;
  const fs::path torch = make_right_libtorch(project.beside("torch"));
  write_text(project.folder() / "a.cpp", "");
  write_text(project.folder() / "b.c", "");
  project.write(
      "find_package(Tessera REQUIRED COMPONENTS harness)\n"
      "tessera_add_ranks_test(first SOURCES a.cpp BACKENDS mpi gloo)\n"
      "tessera_add_ranks_test(second SOURCES a.cpp b.c)\n"
      "foreach(test first first_gloo second)\n"
      "  get_test_property(${test} ENVIRONMENT environment)\n"
      "  message(STATUS \"${test}: ${environment}\")\n"
      "endforeach()\n");
  const ShellOutcome outcome =
      project.configure("", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DTESSERA_LIBTORCH=" + torch.string());
  CAPTURE(outcome.output);
  CHECK(outcome.exit_code == 0);
  for (const char* test :
       {"first: TESSERA_BACKEND=mpi", "first_gloo: TESSERA_BACKEND=gloo", "second: TESSERA_BACKEND=gloo"}) {
    CHECK(contains(outcome.output, std::string(test) + "\n"));
  }
  const std::string commands = project.run("grep '\"command\"' build/compile_commands.json").output;
  CAPTURE(commands);
  CHECK(contains(commands, "-include tessera/tests/harness/prelude.h"));
  const std::size_t of_c = commands.find("b.c.o");
  REQUIRE(of_c != std::string::npos);
  const std::size_t begin = commands.rfind("\"command\"", of_c);
  CHECK_FALSE(contains(commands.substr(begin, of_c - begin), "-include"));

  project.write(
      "find_package(Tessera REQUIRED COMPONENTS harness)\ntessera_add_ranks_test(x SOURCES a.cpp BACKENDS nccl)\n");
  project.check_refuses("", "-DTESSERA_LIBTORCH=" + torch.string(), "there is no backend nccl");
}
