#include "tessera/dtensor/io/checkpoint.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/io/block_checksums.h"
#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/checkpoint_writer.h"
#include "tessera/dtensor/io/save_lock.h"
#include "tessera/tests/dtensor/io/few_descriptors.h"
#include "tessera/tests/dtensor/io/logged.h"
#include "tessera/tests/dtensor/io/other_remover.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tools/launcher/child_process.h"

namespace tessera {
namespace {

std::set<std::string> files_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& item : std::filesystem::directory_iterator(folder)) names.insert(item.path().filename().string());
  return names;
}

// Saves `count` float tensors t00, t01, .. of 100 elements (400 bytes) whose elements are all `value`.
void save(const std::string& path, float value, int64_t count, int64_t max_shard_bytes, int64_t elements = 100) {
  std::vector<TensorEntry> entries;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back({"t" + std::to_string(i / 10) + std::to_string(i % 10), at::kFloat, {elements}, 0, 0});
  }
  const std::vector<SafetensorsHeader> plan = plan_checkpoint(entries, max_shard_bytes, {});
  CheckpointWriter writer(path, plan);
  const at::Tensor tensor = at::full({elements}, value);
  for (int64_t i = 0; i < count; ++i) writer.append(tensor);
  writer.publish();
}

// Returns the value that all tensors of a checkpoint have. Throws when they differ, which shows a mix of two
// checkpoints.
float value_of(const std::string& path) {
  const Checkpoint checkpoint(path);
  std::set<float> values;
  for (const auto& [name, entry] : checkpoint.tensors()) {
    const at::Tensor t = checkpoint.read_box(name, whole_box(entry->shape));
    values.insert(t.min().item<float>());
    values.insert(t.max().item<float>());
  }
  if (values.size() != 1) throw std::runtime_error("the checkpoint mixes " + std::to_string(values.size()) + " values");
  return *values.begin();
}

TEST_CASE("checkpoint: split where the next tensor would make a file too large, and read again") {
  const TempFolder folder;
  save(folder / "model.safetensors", 1, 5, 800);
  CHECK(files_in(folder.path()) ==
        std::set<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                              "model-00003-of-00003.safetensors", "model.safetensors.index.json"});
  for (const char* path : {"", "model.safetensors", "model.safetensors.index.json"}) {
    CAPTURE(path);
    const Checkpoint checkpoint(*path == '\0' ? folder.path() : folder / path);
    CHECK(checkpoint.tensors().size() == 5);
    CHECK(checkpoint.file_of("t02").path() == folder / "model-00002-of-00003.safetensors");
    CHECK(checkpoint.read_box("t04", {{90}, {10}}).equal(at::ones({10})));
    CHECK(checkpoint.bytes_read() == 40);
  }
  const std::string index = read_text(folder / "model.safetensors.index.json");
  CHECK(index.find("\"total_size\": 2000") != std::string::npos);
  CHECK(index.find("\"t00\": \"model-00001-of-00003.safetensors\"") != std::string::npos);
}

FileChecksums checksums_in(const std::string& folder, int64_t block_bytes) {
  FileChecksums all;
  for (const std::string& name : files_in(folder)) {
    const std::string bytes = read_text(folder + "/" + name);
    BlockSums sums(static_cast<int64_t>(bytes.size()), block_bytes);
    sums.add(0, bytes.data(), static_cast<int64_t>(bytes.size()));
    all.emplace(name, sums.checksums(name));
  }
  return all;
}

TEST_CASE("checkpoint: the blocks of one file are kept, until another one is read") {
  const TempFolder folder;
  save(folder / "model.safetensors", 1, 5, 800);
  const FileChecksums checksums = checksums_in(folder.path(), 1 << 20);  // a file is one block
  const Checkpoint checkpoint(folder.path(), &checksums);
  const auto bytes_for = [&](const char* name) {
    const int64_t before = checkpoint.bytes_read();
    CHECK(checkpoint.read_box(name, {{90}, {10}}).equal(at::ones({10})));
    return checkpoint.bytes_read() - before;
  };
  const int64_t first = checksums.at("model-00001-of-00003.safetensors").file_bytes;
  const int64_t second = checksums.at("model-00002-of-00003.safetensors").file_bytes;
  CHECK(bytes_for("t00") == first);  // the header's block is not kept
  CHECK(bytes_for("t01") == 0);
  CHECK(bytes_for("t02") == second);
  CHECK(bytes_for("t00") == first);
}

TEST_CASE("checkpoint: one file when it suffices, in a folder, of no tensors, and a tensor above the limit") {
  const TempFolder folder;
  save(folder.path(), 1, 2, 800);
  CHECK(files_in(folder.path()) == std::set<std::string>{"model.safetensors"});
  CHECK(Checkpoint(folder.path()).tensors().size() == 2);
  save(folder / "none", 0, 0, 0);
  CHECK(Checkpoint(folder / "none").tensors().empty());
  CHECK(plan_checkpoint({{"a", at::kFloat, {100}, 0, 0}, {"b", at::kFloat, {1}, 0, 0}, {"c", at::kFloat, {1}, 0, 0}},
                        100, {})
            .size() == 2);
}

TEST_CASE("checkpoint: written over in either form, only the new one is left") {
  const TempFolder folder;
  const std::string path = folder / "model.safetensors";
  struct Row {
    int64_t max_shard_bytes;
    std::vector<std::string> part;
  };
  const std::vector<Row> rows = {{800, {"model-00001-of-00002.safetensors"}},
                                 {800, {"model-v2-00001-of-00002.safetensors"}},
                                 {800, {"model-00001-of-00002.safetensors"}},
                                 {400, {"model-00001-of-00004.safetensors"}},
                                 {0, {"model.safetensors"}},
                                 {800, {"model-00001-of-00002.safetensors"}},
                                 {0, {"model.safetensors"}}};
  float value = 0;
  for (const Row& row : rows) {
    CAPTURE(value);
    save(path, ++value, 4, row.max_shard_bytes);
    CHECK(value_of(folder.path()) == value);
    const std::set<std::string> files = files_in(folder.path());
    CHECK(files.contains(row.part.front()));
    CHECK(files.size() == (row.max_shard_bytes == 0 ? 1 : row.max_shard_bytes == 800 ? 3 : 5));
  }
}

TEST_CASE("checkpoint: its parts take no name of another checkpoint's parts in the folder") {
  const TempFolder folder;
  const std::string model = folder / "model.safetensors";
  const std::string other = folder / "model-v2.safetensors";  // its parts are called as those of version 2 of `model`
  save(model, 1, 4, 800);
  save(other, 2, 4, 800);
  float value = 2;
  for (const char* part : {"model-v3-00001-of-00002.safetensors", "model-00001-of-00002.safetensors"}) {
    CAPTURE(part);
    save(model, ++value, 4, 800);
    CHECK(value_of(model) == value);
    CHECK(value_of(other) == 2);
    CHECK(files_in(folder.path()).contains(part));
    CHECK(files_in(folder.path()).size() == 6);
  }
  const TempFolder second;
  save(second / "model.safetensors", 1, 4, 800);
  save(second / "model.safetensors", 2, 4, 800);  // these parts are of version 2
  save(second / "model-v2.safetensors", 3, 4, 800);
  CHECK(value_of(second / "model.safetensors") == 2);
  CHECK(value_of(second / "model-v2.safetensors") == 3);
}

TEST_CASE("checkpoint: parts that another index names too are neither removed nor written over") {
  const TempFolder folder;
  const std::string model = folder / "model.safetensors", copied = folder / "best.safetensors";
  save(model, 1, 4, 800);
  std::filesystem::copy_file(folder / "model.safetensors.index.json", folder / "best.safetensors.index.json");
  for (const int64_t bytes : {800, 0}) {
    save(model, 2, 4, bytes);
    CHECK(value_of(model) == 2);
    CHECK(value_of(copied) == 1);
  }
  const std::vector<SafetensorsHeader> plan =
      plan_checkpoint({{"a", at::kFloat, {2}, 0, 0}, {"b", at::kFloat, {2}, 0, 0}}, 8, {});
  CheckpointWriter writer(model, plan);
  for (int i = 0; i < 2; ++i) writer.append(at::ones({2}));
  // Another checkpoint takes the names that this one has chosen.
  write_text(folder / "other.safetensors.index.json",
             R"({"metadata": {"total_size": 8}, "weight_map": {"a": "model-v2-00001-of-00002.safetensors"}})");
  CHECK_THROWS_WITH_AS(writer.publish(), doctest::Contains("has taken the name 'model-v2-00001-of-00002.safetensors'"),
                       std::runtime_error);
  CHECK(value_of(model) == 2);
}

TEST_CASE("checkpoint: parts that no index names are written over, unless an index there cannot be read") {
  const TempFolder folder;
  const std::string model = folder / "model.safetensors";
  write_text(folder / "model-00001-of-00002.safetensors", "left by a save that was cut off");
  save(model, 1, 4, 800);
  CHECK(value_of(model) == 1);
  CHECK(files_in(folder.path()) == std::set<std::string>{"model-00001-of-00002.safetensors",
                                                         "model-00002-of-00002.safetensors",
                                                         "model.safetensors.index.json"});
  write_text(folder / "model-v2-00002-of-00002.safetensors", "left by somebody");
  write_text(folder / "model-v2.safetensors.index.json", "{");
  const std::string text = logged([&] { save(model, 2, 4, 800); });
  CHECK(value_of(model) == 2);
  CHECK(files_in(folder.path()).contains("model-v3-00001-of-00002.safetensors"));
  CHECK(read_text(folder / "model-v2-00002-of-00002.safetensors") == "left by somebody");
  // The unreadable index may name the old parts too.
  CHECK(files_in(folder.path()).contains("model-00001-of-00002.safetensors"));
  CAPTURE(text);
  CHECK(text.find("the files of the checkpoint that was there stay") != std::string::npos);
  CHECK(text.find("'" + (folder / "model-v2.safetensors.index.json") + "': index: not valid JSON") !=
        std::string::npos);
  std::filesystem::remove(folder / "model-v2.safetensors.index.json");
  CHECK(logged([&] { save(model, 3, 4, 800); }).empty());
  CHECK_FALSE(files_in(folder.path()).contains("model-v3-00001-of-00002.safetensors"));
}

TEST_CASE("checkpoint: an index that readers would refuse is refused before anything is written") {
  const TempFolder folder;
  const std::vector<SafetensorsHeader> plan =
      plan_checkpoint({{"a", at::kFloat, {2}, 0, 0}, {"b", at::kFloat, {2}, 0, 0}}, 8, {});
  constexpr int64_t kBytes = 149;
  CHECK_THROWS_WITH_AS(CheckpointWriter(folder / "m", plan, kBytes - 1),
                       "saving: the index of 2 tensors would have 149 bytes, and at most 148 are read; a larger "
                       "max_shard_bytes makes it no shorter: save fewer tensors, or give them shorter names",
                       std::invalid_argument);
  CHECK(files_in(folder.path()).empty());
  CheckpointWriter writer(folder / "m", plan, kBytes);
  for (int i = 0; i < 2; ++i) writer.append(at::ones({2}));
  writer.publish();
  CHECK(value_of(folder / "m") == 1);
  CHECK(static_cast<int64_t>(std::filesystem::file_size(folder / "m.index.json")) == kBytes);
}

TEST_CASE("checkpoint: a save that is not published leaves nothing, and the old one as it was") {
  const TempFolder folder;
  const std::string path = folder / "model.safetensors";
  save(path, 1, 4, 0);
  {
    const std::vector<SafetensorsHeader> plan =
        plan_checkpoint({{"a", at::kFloat, {2}, 0, 0}, {"b", at::kFloat, {2}, 0, 0}}, 8, {});
    CheckpointWriter writer(path, plan);
    writer.append(at::zeros({2}));
    CHECK_THROWS_WITH_AS(writer.append(at::zeros({3})),
                         doctest::Contains("tensor 'b': planned as Float of shape [2], given Float of shape [3]"),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(writer.publish(), doctest::Contains("publish() before the last tensor"),
                         std::invalid_argument);
    // The old one, two temporary files, and the lock.
    CHECK(files_in(folder.path()).size() == 4);
  }
  CHECK(files_in(folder.path()) == std::set<std::string>{"model.safetensors"});
  CHECK(value_of(path) == 1);
}

TEST_CASE("checkpoint: a second save to one path is refused while the first runs, also from another process") {
  const TempFolder folder;
  const std::string path = folder / "model.safetensors";
  save(path, 1, 4, 800);
  const std::vector<SafetensorsHeader> plan =
      plan_checkpoint({{"a", at::kFloat, {2}, 0, 0}, {"b", at::kFloat, {2}, 0, 0}}, 8, {});
  {
    CheckpointWriter writer(path, plan);
    const char* const refused = "another save to it runs, of this job or another";
    CHECK_THROWS_WITH_AS(save(path, 2, 4, 800), doctest::Contains(refused), std::runtime_error);
    const pid_t child = ::fork();
    if (child == 0) {
      std::string text = message_of([&] { const SaveLock lock(path, /*alone=*/false); });
      ::_exit(text.find(refused) != std::string::npos ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    CHECK(status == 0);
    save(folder / "other.safetensors", 3, 4, 800);
    writer.append(at::full({2}, 4.0F));
    writer.append(at::full({2}, 4.0F));
    writer.publish();
  }
  CHECK(value_of(path) == 4);
  CHECK(value_of(folder / "other.safetensors") == 3);
  save(path, 5, 4, 800);
  CHECK(value_of(path) == 5);
  // Ranks that all save one plain module write the same file.
  {
    CheckpointWriter writer(path, plan_checkpoint({{"a", at::kFloat, {2}, 0, 0}}, 0, {}));
    save(path, 6, 1, 0);
    CHECK_THROWS_WITH_AS(save(path, 2, 4, 800), doctest::Contains("another save to it runs"), std::runtime_error);
    writer.append(at::full({2}, 7.0F));
    writer.publish();
  }
  CHECK(value_of(path) == 7);
  CHECK(files_in(folder.path()).count(".model.safetensors.lock") == 0);
}

TEST_CASE(
    "checkpoint: the mode is that of the file replaced, else what the umask leaves; temporary files are private") {
  const TempFolder folder;
  const auto mode = [](const std::string& path) {
    struct stat status = {};
    REQUIRE(::stat(path.c_str(), &status) == 0);
    return status.st_mode & 07777;
  };
  const mode_t before = ::umask(027);
  save(folder / "a", 1, 1, 0);
  CHECK(mode(folder / "a") == 0640);
  REQUIRE(::chmod((folder / "a").c_str(), 0604) == 0);
  save(folder / "a", 2, 1, 0);
  CHECK(mode(folder / "a") == 0604);
  ::umask(before);
  AtomicFile file(folder / "b");
  for (const std::string& name : files_in(folder.path())) {
    if (name.starts_with(".b.tmp-")) CHECK(mode(folder / name) == 0600);
  }
}

TEST_CASE(
    "checkpoint: temporary files of a process that ended are removed by the next save, those of a live one are not") {
  const TempFolder folder;
  write_text(folder / ".a.tmp-0123456789abcdef", "left behind");
  AtomicFile live(folder / "a");
  save(folder / "a", 1, 1, 0);
  CHECK(files_in(folder.path()).size() == 2);
  CHECK_FALSE(files_in(folder.path()).contains(".a.tmp-0123456789abcdef"));
  live.write("x", 1);
  live.sync();
  live.publish();
  CHECK(read_text(folder / "a") == "x");
}

TEST_CASE("checkpoint: a temporary file that another save takes for abandoned, before it is locked, is not used") {
  for (const bool at_once : {true, false}) {
    CAPTURE(at_once);
    const TempFolder folder;
    OtherRemover other(at_once);
    AtomicFile file(folder / "a");
    REQUIRE(other.path().find("/.a.tmp-") != std::string::npos);
    other.finish();
    file.write("x", 1);
    file.sync();
    file.publish();
    CHECK(read_text(folder / "a") == "x");
    CHECK(files_in(folder.path()) == std::set<std::string>{"a"});
  }
}

TEST_CASE("checkpoint: a path that cannot be written says why") {
  const TempFolder folder;
  CHECK_THROWS_WITH_AS(save(folder / "no/such/f", 1, 1, 0), doctest::Contains("there is no folder '"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(save(folder / "f.index.json", 1, 1, 0), doctest::Contains("pass the name without '.index.json'"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(plan_checkpoint({}, -1, {}), doctest::Contains("max_shard_bytes is -1"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(save("/proc/f", 1, 1, 0), doctest::Contains("cannot create a file to save '/proc/f'"),
                       std::runtime_error);
}

TEST_CASE("checkpoint: anything but a regular file at the path is refused, and stays unchanged") {
  const TempFolder folder;
  save(folder / "whole", 1, 1, 0);
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  REQUIRE(::mkfifo((folder / "indexed.index.json").c_str(), 0600) == 0);
  std::filesystem::create_symlink("whole", folder / "link");
  std::filesystem::create_symlink("nothing", folder / "dangling");
  std::filesystem::create_directories(folder / "in/model.safetensors");
  std::filesystem::create_directory_symlink("sub", folder / "to_folder");
  std::filesystem::create_directory(folder / "sub");
  struct Row {
    const char* name;
    const char* want;
  };
  const std::vector<Row> rows = {
      {"pipe", "pipe': it is a pipe, which a save would replace; name a file"},
      {"indexed", "indexed.index.json': it is a pipe"},
      {"link",
       "link': it is a symbolic link, which a save would replace; name the file that it points to, or remove it"},
      {"dangling", "it is a symbolic link"},
      {"in", "in/model.safetensors': it is a folder"},
  };
  const std::set<std::string> before = files_in(folder.path());
  for (const Row& row : rows) {
    CAPTURE(row.name);
    for (const int64_t max_shard_bytes : {0, 400}) {
      CHECK_THROWS_WITH_AS(save(folder / row.name, 2, 2, max_shard_bytes), doctest::Contains(row.want),
                           std::invalid_argument);
    }
  }
  CHECK(files_in(folder.path()) == before);
  CHECK(std::filesystem::is_fifo(folder / "pipe"));
  CHECK(std::filesystem::is_symlink(folder / "link"));
  CHECK(value_of(folder / "whole") == 1);
  CHECK_THROWS_WITH_AS(AtomicFile(folder / "pipe"), doctest::Contains("it is a pipe"), std::invalid_argument);
  save(folder / "to_folder", 3, 1, 0);
  CHECK(value_of(folder / "sub/model.safetensors") == 3);
  CHECK_THROWS_WITH_AS(save("", 1, 1, 0), "saving to '': the path is empty; name a file, or a folder that is there",
                       std::invalid_argument);
}

TEST_CASE("checkpoint: an index that is damaged, leads astray or mixes checkpoints is refused") {
  const TempFolder folder;
  const std::string index = folder / "model.safetensors.index.json";
  save(folder / "a.safetensors", 1, 2, 0);
  save(folder / "b.safetensors", 1, 2, 0);
  struct Row {
    const char* why;
    std::string json;
    const char* want;
  };
  const std::vector<Row> rows = {
      {"empty", "", "not valid JSON"},
      {"a list", "[]", "expected an object, found an array"},
      {"no map", R"({"metadata":{"total_size":1,"x":[{"y":null}, true, -1, 1.5, "s"]}})",
       "the key 'weight_map' is missing"},
      {"no tensors", R"({"weight_map":{}})", "it names no tensor"},
      {"map twice", R"({"weight_map":{},"weight_map":{}})", "the key 'weight_map' appears twice"},
      {"unknown key", R"({"weights":{}})", "found the key 'weights'"},
      {"tensor twice", R"({"weight_map":{"t00":"a.safetensors","t00":"b.safetensors"}})",
       "the tensor 't00' appears twice"},
      {"a number", R"({"weight_map":{"t00":1}})", "expected the file of tensor 't00', found the number 1"},
      {"an absolute path", R"({"weight_map":{"t00":"/etc/passwd"}})",
       "tensor 't00': '/etc/passwd' is not the name of a file in the index's folder"},
      {"the folder above", R"({"weight_map":{"t00":".."}})", "is not the name of a file"},
      {"out and in", R"({"weight_map":{"t00":"../x/a.safetensors"}})", "is not the name of a file"},
      {"a NUL", R"({"weight_map":{"t00":"a\u0000b"}})", "is not the name of a file"},
      {"no such file", R"({"weight_map":{"t00":"c.safetensors"}})", "c.safetensors': No such file or directory"},
      {"no such tensor", R"({"weight_map":{"t00":"a.safetensors","t01":"a.safetensors","x":"a.safetensors"}})",
       "tensor 'x' is not in '"},
      {"a tensor left out", R"({"weight_map":{"t00":"a.safetensors"}})",
       "holds tensor 't01', which the index does not list"},
      {"a tensor in two files", R"({"weight_map":{"t00":"a.safetensors","t01":"b.safetensors"}})",
       "holds tensor 't01', which the index says is in 'b.safetensors'"},
      {"cut off", R"({"weight_map":{"t00":"a.safet)", "not valid JSON"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    write_text(index, row.json);
    const std::string text = message_of([&] { const Checkpoint checkpoint(folder.path()); });
    CAPTURE(text);
    CHECK(text.find(row.want) != std::string::npos);
  }
}

TEST_CASE("checkpoint: a process that may open no more files says how many there are, and what to do") {
  const TempFolder folder;
  save(folder.path(), 1, 5, 800);
  std::string text;
  {
    const FewDescriptors two(2);
    text = message_of([&] { const Checkpoint checkpoint(folder.path()); });
  }
  CHECK(text == "cannot open '" + (folder / "model-00003-of-00003.safetensors") +
                    "', one of 3 files that are open at once; let a process open more (`ulimit -n`), or save with a "
                    "larger max_shard_bytes, which makes fewer files: Too many open files");
}

TEST_CASE("checkpoint: a folder without one says what it looked for") {
  const TempFolder folder;
  CHECK_THROWS_WITH_AS(Checkpoint(folder.path()), doctest::Contains("holds neither model.safetensors nor"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(Checkpoint(folder / "x"), doctest::Contains("x': No such file or directory"),
                       std::runtime_error);
}

// Saves one value after the other in a child process, by turns as one file and as parts, until it is killed.
[[noreturn]] void save_for_ever(const std::string& path, float first) {
  try {
    for (float value = first;; ++value) save(path, value, 8, static_cast<int>(value) % 3 == 0 ? 0 : 60000, 5000);
  } catch (...) {
    ::_exit(3);
  }
}

TEST_CASE(
    "checkpoint: killed at any moment while saving, a whole checkpoint loads, no older than the last that was there") {
  const TempFolder folder;
  const std::string path = folder / "model.safetensors";
  at::set_num_threads(1);  // the child has no other thread
  // This is long enough for a few saves, however slow the machine or the build is.
  const auto start = std::chrono::steady_clock::now();
  save(path, 0, 8, 60000, 5000);
  save(path, 1, 8, 0, 5000);
  const auto two_saves =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start);
  const auto longest = static_cast<int>(20000 + 4 * two_saves.count());
  std::mt19937 random(7);
  float last = 1;
  for (int round = 0; round < 60; ++round) {
    const pid_t child = start_child([&]() -> int { save_for_ever(path, last + 1); });
    std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<int>(0, longest)(random)));
    REQUIRE(::kill(child, SIGKILL) == 0);
    REQUIRE(wait_for(child) == 1000 + SIGKILL);
    const float now = value_of(path);
    REQUIRE(now >= last);
    last = now;
  }
  CHECK(last > 1);
  save(path, last + 1, 8, 0, 5000);
  for (const std::string& name : files_in(folder.path())) CHECK_FALSE(name.starts_with(".model.safetensors.tmp-"));
}

}  // namespace
}  // namespace tessera
