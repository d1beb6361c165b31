#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/io/block_checksums.h"
#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/dtensor/io/state_writer.h"
#include "tessera/dtensor/io/step_folders.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/dtensor/io/changed_manifest.h"
#include "tessera/tests/dtensor/io/failing_reads.h"
#include "tessera/tests/dtensor/io/few_descriptors.h"
#include "tessera/tests/dtensor/io/logged.h"
#include "tessera/tests/dtensor/io/other_remover.h"
#include "tessera/tests/dtensor/io/synced_paths.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tools/launcher/child_process.h"

namespace tessera {
namespace {

// Makes a folder that counts as a whole state.
void make_step(const std::string& folder, int64_t step) {
  const std::string path = folder + "/" + step_folder_name(step);
  std::filesystem::create_directories(path);
  write_text(path + "/f", "123456789");
  BlockSums sums(9, 8);
  sums.add(0, "123456789", 9);
  write_text(path + "/state.json", serialize_state_manifest({.step = step, .files = {{"f", sums.checksums("f")}}}));
}

std::vector<int64_t> steps_in(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const auto& item : step_folders(folder)) steps.push_back(item.first);
  return steps;
}

int64_t entries_in(const std::string& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

TEST_CASE("step folders: the newest whole state is found; torn ones and other names are not") {
  const TempFolder folder;
  CHECK_FALSE(newest_training_state(folder / "none").has_value());
  CHECK_FALSE(newest_training_state(folder.path()).has_value());
  for (const int64_t step : {2, 30, 400, 123456789}) make_step(folder.path(), step);
  for (const char* name : {"step_5", "step_0000000x", "step_-0000001", ".step_00000900.tmp-1", "step_00000900x"})
    std::filesystem::create_directories(folder / name);
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{2, 30, 400, 123456789});
  CHECK(newest_training_state(folder.path()) == folder / "step_123456789");
  std::filesystem::remove(folder / "step_123456789/state.json");
  CHECK(newest_training_state(folder.path()) == folder / "step_00000400");
  write_text(folder / "step_00000400/f", "12345678");
  CHECK(newest_training_state(folder.path()) == folder / "step_00000030");
  write_text(folder / "step_00000030/state.json", read_text(folder / "step_00000030/state.json").substr(0, 60));
  CHECK(newest_training_state(folder.path()) == folder / "step_00000002");
}

TEST_CASE("step folders: where there are some and none is whole, the reason of the newest is in the error") {
  const TempFolder folder;
  for (const int64_t step : {1, 2}) {
    make_step(folder.path(), step);
    write_text(folder / (step_folder_name(step) + "/f"), std::string(static_cast<std::size_t>(step), 'x'));
  }
  CHECK(message_of([&] { newest_training_state(folder.path()); }) ==
        "newest_training_state: '" + folder.path() +
            "' has training states of 2 steps, and none is whole; bring one back from a copy, or remove them if they "
            "are not needed. The newest: '" +
            (folder / "step_00000002/f") + "' has 2 bytes, not the 9 that were saved");
}

TEST_CASE("step folders: what a state lacks is said by name; one of another version is neither whole nor damaged") {
  struct Row {
    const char* why;
    std::function<void(const std::string& state)> harm;
    const char* want;
  };
  const std::vector<Row> rows = {
      {"no manifest", [](const std::string& state) { std::filesystem::remove(state + "/state.json"); },
       "cannot open 'STATE/state.json': No such file or directory"},
      {"no file", [](const std::string& state) { std::filesystem::remove(state + "/f"); },
       "cannot examine 'STATE/f': No such file or directory"},
      {"a file that was cut", [](const std::string& state) { write_text(state + "/f", "1234"); },
       "'STATE/f' has 4 bytes, not the 9 that were saved"},
      {"a torn manifest", [](const std::string& state) { write_text(state + "/state.json", "{"); },
       "'STATE/state.json': its 1 bytes do not begin and end as those of a manifest; it is torn, damaged or no "
       "training "
       "state: load another one"},
      {"a folder in its place",
       [](const std::string& state) {
         std::filesystem::remove(state + "/state.json");
         std::filesystem::create_directory(state + "/state.json");
       },
       "'STATE/state.json' is not a regular file; name a .safetensors file"},
  };
  const TempFolder folder;
  const std::string state = folder / "step_00000002";
  for (const Row& row : rows) {
    CAPTURE(row.why);
    std::filesystem::remove_all(state);
    make_step(folder.path(), 2);
    CHECK_NOTHROW(check_whole_state(state));
    row.harm(state);
    std::string want = row.want;
    want.replace(want.find("STATE"), 5, state);
    CHECK_THROWS_WITH_AS(check_whole_state(state), want.c_str(), DamagedFile);
    CHECK_FALSE(is_whole_state(state));
  }
  std::filesystem::remove_all(state);
  for (const int64_t step : {1, 2}) make_step(folder.path(), step);
  write_text(state + "/state.json",
             changed_manifest(read_text(state + "/state.json"), "\"version\":1", "\"version\":7"));
  CHECK_THROWS_WITH_AS(is_whole_state(state), doctest::Contains("its version is 7"), OtherVersion);
  CHECK_THROWS_AS(newest_training_state(folder.path()), OtherVersion);  // not step 1
  keep_newest_steps(folder.path(), 1, 2);
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{1, 2});
}

TEST_CASE("step folders: a state whose bytes the disk has lost is not whole; other errors are not taken for that") {
  const TempFolder folder;
  for (const int64_t step : {1, 2}) make_step(folder.path(), step);
  for (const int error : {EIO, EBADMSG, EUCLEAN}) {
    CAPTURE(error);
    const FailingReads reads("step_00000002/state.json", error);
    CHECK_FALSE(is_whole_state(folder / "step_00000002"));
    CHECK(newest_training_state(folder.path()) == folder / "step_00000001");
  }
  for (const int error : {ENOMEM, EACCES}) {
    CAPTURE(error);
    const FailingReads reads("step_00000002/state.json", error);
    CHECK_THROWS_AS(is_whole_state(folder / "step_00000002"), std::system_error);
    CHECK_THROWS_AS(newest_training_state(folder.path()), std::system_error);
  }
}

TEST_CASE("step folders: a link that leads nowhere is none, and one that cannot be followed is an error") {
  const TempFolder folder;
  make_step(folder.path(), 1);
  std::filesystem::create_symlink("nowhere", folder / "step_00000002");
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{1});
  std::filesystem::create_symlink("step_00000003", folder / "step_00000003");
  CHECK_THROWS_WITH_AS(step_folders(folder.path()), doctest::Contains("cannot examine '"), std::system_error);
}

TEST_CASE(
    "step folders: a process that cannot open them says why, and takes no state for torn, absent or superfluous") {
  const TempFolder folder;
  for (const int64_t step : {1, 2, 3}) make_step(folder.path(), step);
  const auto message_without_descriptors = [](const auto& act) -> std::string {
    try {
      const FewDescriptors none(0);
      act();
    } catch (const std::system_error& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  CHECK(message_without_descriptors([&] { newest_training_state(folder.path()); }) ==
        "cannot list '" + folder.path() + "': Too many open files");
  CHECK(message_without_descriptors([&] {
          is_whole_state(folder / "step_00000003");
        }).find("step_00000003/state.json': Too many open files") != std::string::npos);
  CHECK(message_without_descriptors([&] { keep_newest_steps(folder.path(), 1, 3); }) == "nothing was thrown");
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{1, 2, 3});
  CHECK(newest_training_state(folder.path()) == folder / "step_00000003");
}

TEST_CASE("write_state: a rank whose folder has gone says why: the failure that made it go, though it comes later") {
  const TempFolder folder;
  std::string text;
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    barrier(init_device_mesh("cpu", {2}, {"tp"}, world), 0);
    if (world->rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      world->fail("train_step", "rank 0 has lost its disk");
      return;
    }
    StateJob job = {.rank = 1, .ranks = {0, 1}, .path = folder / "gone", .world = world};
    try {
      write_state(job);
    } catch (const std::exception& error) {
      text = error.what();
    }
  });
  CAPTURE(text);
  CHECK(text.find("rank 0 has lost its disk") != std::string::npos);
  CHECK(text.find("gone") == std::string::npos);
}

TEST_CASE("write_state: where a job has failed when all parts are there, values of a GPU get no name, and others do") {
  for (const bool is_from_gpu : {true, false}) {
    CAPTURE(is_from_gpu);
    const TempFolder folder;
    std::string text;
    run_in_process(2, [&](const std::shared_ptr<World>& world) {
      barrier(init_device_mesh("cpu", {2}, {"tp"}, world), 0);
      if (world->rank() == 1) return;
      StateJob job = {.ranks = {0}, .world = world, .is_from_gpu = is_from_gpu, .folder = folder.path()};
      job.new_folder = std::make_unique<NewStepFolder>(folder.path(), 1);
      job.path = job.new_folder->path();
      world->fail("train_step", "rank 0 has lost its GPU");
      text = message_of([&] { write_state(job); });
    });
    CAPTURE(text);
    CHECK((text.find("rank 0 has lost its GPU") != std::string::npos) == is_from_gpu);
    CHECK(entries_in(folder.path()) == (is_from_gpu ? 0 : 1));
  }
}

TEST_CASE("write_state: a rank that may open no more files says how many there are, and what to do") {
  const TempFolder folder;
  StateJob job = {.ranks = {0}, .world = World::create({}), .folder = folder.path()};
  for (const char* name : {"a", "b", "c"}) job.files.push_back({.name = name, .head = "x", .bytes = 1});
  job.new_folder = std::make_unique<NewStepFolder>(folder.path(), 1);
  job.path = job.new_folder->path();
  create_files(job.path, job.files);
  std::string text;
  {
    const FewDescriptors two(2);
    text = message_of([&] { write_state(job); });
  }
  CHECK(text == "cannot open '" + job.path +
                    "/c', one of 3 files that are open at once; let a process open more (`ulimit -n`), or save with a "
                    "larger max_shard_bytes, which makes fewer files: Too many open files");
}

TEST_CASE("step folders: the newest whole ones are kept, and what was just saved in any case") {
  const TempFolder folder;
  for (const int64_t step : {1, 2, 3, 4, 5}) make_step(folder.path(), step);
  keep_newest_steps(folder.path(), 0, 5);
  CHECK(steps_in(folder.path()).size() == 5);
  std::filesystem::remove(folder / "step_00000005/f");  // not whole: it does not count
  keep_newest_steps(folder.path(), 2, 5);
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{3, 4, 5});
  CHECK(entries_in(folder.path()) == 3);
}

TEST_CASE(
    "step folders: a run that has gone back keeps what it saves, and the later steps stay until it reaches them") {
  const TempFolder folder;
  for (const int64_t step : {100, 150, 200}) make_step(folder.path(), step);
  for (const int64_t step : {110, 120}) {
    make_step(folder.path(), step);
    keep_newest_steps(folder.path(), 2, step);
  }
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{110, 120, 150, 200});
  make_step(folder.path(), 210);
  keep_newest_steps(folder.path(), 2, 210);
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{200, 210});
}

// Makes a folder whose path has so many bytes.
std::string make_long_folder(std::string path, std::size_t bytes) {
  constexpr std::size_t kName = 200;
  while (path.size() < bytes) {
    const std::size_t left = bytes - path.size();
    path += "/" + std::string(left > kName + 50 ? kName : left - 1, 'd');
  }
  std::filesystem::create_directories(path);
  return path;
}

TEST_CASE("step folders: an old state that cannot be removed stays, with a warning, since the new one is saved") {
  const TempFolder folder;
  // A path may have 4095 bytes: the states' files have fewer, the longer name that a state gets before has more.
  const std::string root = make_long_folder(folder.path(), 4065);
  for (const int64_t step : {1, 2}) make_step(root, step);
  const std::string text = logged([&] { keep_newest_steps(root, 1, 2); });
  CAPTURE(text);
  CHECK(text.find("step_00000001' cannot be removed: File name too long") != std::string::npos);
  CHECK(steps_in(root) == std::vector<int64_t>{1, 2});
  CHECK(entries_in(root) == 2);
}

TEST_CASE("step folders: a new one that another job takes for abandoned, before it is locked, is not used") {
  for (const bool at_once : {true, false}) {
    CAPTURE(at_once);
    const TempFolder folder;
    OtherRemover other(at_once);
    NewStepFolder step(folder.path(), 1);
    REQUIRE(other.path().find("/.step_00000001.tmp-") != std::string::npos);
    other.finish();
    write_text(step.path() + "/f", "x");
    step.publish();
    CHECK(read_text(folder / "step_00000001/f") == "x");
    CHECK(entries_in(folder.path()) == 1);
  }
}

TEST_CASE("step folders: one appears whole under its name, replaces an older one, and goes when it is given up") {
  const TempFolder folder;
  const std::string root = folder / "new";
  {
    NewStepFolder given_up(root, 3);
    write_text(given_up.path() + "/f", "x");
    CHECK(steps_in(root).empty());
  }
  CHECK(entries_in(root) == 0);
  for (const char* text : {"first", "second"}) {
    NewStepFolder one(root, 3);
    NewStepFolder other(root, 3);  // a second job: it does not take the first one's folder for abandoned
    CHECK(one.path() != other.path());
    write_text(one.path() + "/f", text);
    one.publish();
    CHECK(read_text(root + "/step_00000003/f") == text);
  }
  CHECK(entries_in(root) == 1);
  CHECK_THROWS_WITH_AS(NewStepFolder("/proc/none", 1), doctest::Contains("cannot make the folder '/proc/none'"),
                       std::runtime_error);
}

TEST_CASE("step folders: one that is given up is gone from its path before its files are") {
  const TempFolder folder;
  auto step = std::make_unique<NewStepFolder>(folder.path(), 3);
  const std::string path = step->path();
  constexpr int kFiles = 2000;
  for (int i = 0; i < kFiles; ++i) write_text(fmt::format("{}/{}", path, i), "");
  std::atomic<bool> ends{false};
  bool lacks_files = false;
  std::thread rank([&] {  // writes into the folder while the first rank removes it
    while (!ends) {
      for (int i = 0; i < kFiles && !ends; ++i) {
        if (std::filesystem::exists(fmt::format("{}/{}", path, i))) continue;
        lacks_files = lacks_files || std::filesystem::exists(path);
      }
    }
  });
  step.reset();
  ends = true;
  rank.join();
  CHECK_FALSE(lacks_files);
  CHECK(entries_in(folder.path()) == 0);
}

TEST_CASE("step folders: where names cannot be exchanged, two renames replace an older one, with a warning") {
  static int error = 0;
  const ExchangeNames refuse = [](const char*, const char*) {
    errno = error;
    return -1;
  };
  const TempFolder folder;
  const auto save = [&](const char* text) {
    NewStepFolder step(folder.path(), 3);
    write_text(step.path() + "/f", text);
    step.publish(refuse);
  };
  CHECK(logged([&] { save("first"); }).empty());
  for (const int each : {EINVAL, ENOSYS, EOPNOTSUPP}) {
    CAPTURE(each);
    error = each;
    const std::string text = logged([&] { save(std::to_string(each).c_str()); });
    CHECK(text.find("step_00000003' has been replaced by two renames") != std::string::npos);
    CHECK(read_text(folder / "step_00000003/f") == std::to_string(each));
    CHECK(entries_in(folder.path()) == 1);
  }
  error = EIO;
  CHECK_THROWS_WITH_AS(save("last"), doctest::Contains("cannot exchange for a new folder '"), std::system_error);
  CHECK(read_text(folder / "step_00000003/f") == std::to_string(EOPNOTSUPP));
  CHECK(entries_in(folder.path()) == 1);
}

TEST_CASE("step folders: what other ranks of the same job have saved is not replaced, whoever was there before") {
  const ExchangeNames refuse = [](const char*, const char*) {
    errno = EINVAL;
    return -1;
  };
  for (const ExchangeNames exchange : {ExchangeNames(exchange_names), refuse}) {
    const TempFolder folder;
    const auto save = [&](const SavedBy& by, const char* text) {
      NewStepFolder step(folder.path(), 3, by);
      write_text(step.path() + "/f", text);
      logged([&] { step.publish(exchange); });
    };
    save({.job = "old", .ranks = {0, 1}}, "old");
    {
      // Both begin while an older job's state is there.
      NewStepFolder one(folder.path(), 3, {.job = "new", .ranks = {1, 0}}),
          other(folder.path(), 3, {.job = "new", .ranks = {2, 3}});
      for (NewStepFolder* each : {&one, &other}) write_text(each->path() + "/f", each == &one ? "one" : "other");
      logged([&] { one.publish(exchange); });
      const std::string text = message_of([&] { logged([&] { other.publish(exchange); }); });
      CHECK(text ==
            "ranks 2, 3 cannot save '" + folder / "step_00000003" +
                "', which ranks 0, 1 of this job have saved: one would replace the other's state; give each mesh "
                "a folder of its own");
      CHECK(read_text(folder / "step_00000003/f") == "one");
    }
    CHECK(entries_in(folder.path()) == 1);
    CHECK(message_of([&] { save({.job = "new", .ranks = {2}}, "third"); }).starts_with("ranks 2 cannot save '"));
    save({.job = "new", .ranks = {0, 1}}, "again");  // the order of the ranks does not count
    save({.job = "later", .ranks = {2}}, "later");
    std::filesystem::remove(folder / "step_00000003/.saved_by");
    save({.job = "later", .ranks = {5}}, "by nobody");
    CHECK(read_text(folder / "step_00000003/f") == "by nobody");
    CHECK(entries_in(folder.path()) == 1);
  }
}

TEST_CASE("step folders: the names of folders that are made for them are written to disk, those of others are not") {
  const TempFolder folder;
  {
    const SyncedPaths synced;
    const NewStepFolder step(folder / "runs/of/today", 1);
    for (const char* name : {"", "runs", "runs/of"}) {
      CAPTURE(name);
      CHECK(synced.has(folder / name));
    }
  }
  const SyncedPaths synced;
  const NewStepFolder step(folder / "runs/of/today", 2);
  CHECK_FALSE(synced.has(folder / "runs/of"));
}

TEST_CASE("step folders: what a killed process left is removed by the next save") {
  const TempFolder folder;
  const pid_t child = start_child([&] {
    const NewStepFolder left(folder.path(), 1);
    write_text(left.path() + "/f", "half");
    return ::kill(::getpid(), SIGKILL);
  });
  REQUIRE(wait_for(child) == 1000 + SIGKILL);
  CHECK(entries_in(folder.path()) == 1);
  { NewStepFolder next(folder.path(), 2); }
  CHECK(entries_in(folder.path()) == 0);
}

}  // namespace
}  // namespace tessera
