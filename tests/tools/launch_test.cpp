#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/skip.h"
#include "tessera/tests/harness/small_disk.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/tools/launching.h"
#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/private_folder.h"
#include "tessera/tools/launcher/process_group.h"
#include "tessera/tools/launcher/rank_environment.h"
#include "tessera/tools/launcher/signal_queue.h"

using tessera::PrivateFolder;
using tessera::wait_for;
using tessera::testing::contains;
using tessera::testing::content_of;
using tessera::testing::launch;
using tessera::testing::launch_script;
using tessera::testing::LaunchOutcome;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;
using tessera::testing::SmallDisk;
using tessera::testing::start_launch;
using tessera::testing::wait_until;

TEST_CASE("launch: each line carries its rank, on the stream that it was written to") {
  const LaunchOutcome outcome = launch_script("2", "echo one; echo two; echo bad >&2; printf unfinished");
  CHECK(outcome.exit_code == 0);
  for (const char* line : {"[0] one\n", "[1] one\n", "[0] two\n", "[1] unfinished\n"})
    CHECK(contains(outcome.out, line));
  CHECK(contains(outcome.err, "[1] bad\n"));
  CHECK_FALSE(contains(outcome.out, "bad"));
}

TEST_CASE("launch --no-prefix: lines as they were written") {
  const LaunchOutcome outcome =
      launch({"--no-prefix", "-n", "2", "bash", "-c", "if [ $RANK = 1 ]; then echo one; echo bad >&2; fi"});
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out == "one\n");
  CHECK(outcome.err == "bad\n");
}

TEST_CASE("launch --no-prefix: standard output is passed on before a line ends, to the byte") {
  const PrivateFolder folder;
  const std::string go = folder.path() + "/go", out = folder.path() + "/out";
  REQUIRE(::mkfifo(go.c_str(), 0600) == 0);
  const pid_t launcher = start_launch(
      {"--no-prefix", "-n", "1", "bash", "-c", "printf a; read -r < " + go + R"(; printf '\xff\n\0b')"}, folder.path());
  CHECK(wait_until([&] { return content_of(out) == "a"; }));
  std::ofstream(go) << "go\n";
  CHECK(wait_for(launcher) == 0);
  CHECK(content_of(out) == std::string("a\xff\n\0b", 5));
}

TEST_CASE("launch: ranks learn who they are, and the folder of their store is theirs alone and removed") {
  const PrivateFolder folder;
  const LaunchOutcome outcome =
      launch_script("3",
                    "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE threads $OMP_NUM_THREADS "
                    "mode $(stat -c %a $(dirname $TESSERA_STORE)); dirname $TESSERA_STORE >" +
                        folder.path() + "/where");
  for (const char* line : {"[0] 0/3 0/3", "[1] 1/3 1/3", "[2] 2/3 2/3", "mode 700"}) CHECK(contains(outcome.out, line));
  const std::string where = content_of(folder.path() + "/where");
  CHECK(contains(where, "/tessera-"));
  CHECK_FALSE(std::filesystem::exists(where.substr(0, where.size() - 1)));
}

TEST_CASE("launch: variables of another launcher do not reach a rank") {
  ::setenv("OMPI_COMM_WORLD_RANK", "5", 1);
  ::setenv("MASTER_ADDR", "elsewhere", 1);
  ::setenv("ROLE_ARN", "mine", 1);  // is no launcher's
  ::setenv("OMP_NUM_THREADS", "3", 1);
  const std::vector<std::string> lines = tessera::rank_environment(1, 2, "/store", {{"EXTRA", "given"}});
  ::unsetenv("OMPI_COMM_WORLD_RANK");
  ::unsetenv("MASTER_ADDR");
  ::unsetenv("ROLE_ARN");
  ::unsetenv("OMP_NUM_THREADS");
  const auto has = [&](const std::string& part) {
    for (const std::string& line : lines) {
      if (line.starts_with(part)) return true;
    }
    return false;
  };
  for (const char* part :
       {"RANK=1", "WORLD_SIZE=2", "TESSERA_STORE=/store", "EXTRA=given", "ROLE_ARN=mine", "OMP_NUM_THREADS=3"})
    CHECK(has(part));
  CHECK_FALSE(has("OMPI_"));
  CHECK_FALSE(has("MASTER_ADDR"));
}

TEST_CASE("launch: the ranks share the cores that the launcher may use") {
  const char* const given = std::getenv("OMP_NUM_THREADS");
  const std::string before = given == nullptr ? "" : given;
  ::unsetenv("OMP_NUM_THREADS");
  const auto threads = [](int64_t size) {
    for (const std::string& line : tessera::rank_environment(0, size, "/store", {})) {
      if (line.starts_with("OMP_NUM_THREADS=")) return line.substr(line.find('=') + 1);
    }
    return std::string();
  };
  cpu_set_t allowed;
  REQUIRE(::sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  const int64_t cores = CPU_COUNT(&allowed);
  CHECK(threads(1) == std::to_string(cores));
  CHECK(threads(2) == std::to_string(std::max<int64_t>(1, cores / 2)));
  CHECK(threads(4096) == "1");
  if (given != nullptr) ::setenv("OMP_NUM_THREADS", before.c_str(), 1);
}

TEST_CASE("launch: the first failing rank's exit code is returned, and the rest are ended") {
  const LaunchOutcome quiet = launch_script("3", "[ $RANK = 1 ] && exit 7; sleep 100");
  CHECK(quiet.exit_code == 7);
  CHECK(quiet.seconds < 20);
  CHECK(contains(quiet.err, "rank 1 exited with code 7"));
  const LaunchOutcome deaf =
      launch_script("2", "[ $RANK = 1 ] && kill -9 $$; trap '' TERM; while true; do sleep 100; done");
  CHECK(deaf.exit_code == 128 + 9);
  CHECK(deaf.seconds < 20);
}

TEST_CASE("launch: the other ranks read which one was lost, and have time to say so") {
  const LaunchOutcome outcome =
      launch_script("2",
                    "[ $RANK = 1 ] && kill -9 $$; while [ ! -e $TESSERA_STORE.lost ]; do sleep 0.02; done; "
                    "sleep 1; echo \"read: $(cat $TESSERA_STORE.lost)\"; exit 3");
  CHECK(outcome.exit_code == 128 + 9);
  CHECK(contains(outcome.out, "[0] read: rank 1 was killed by signal 9\n"));
}

TEST_CASE("launch: signals reach every rank") {
  const PrivateFolder folder;
  const pid_t pid = start_launch(
      {"-n", "2", "bash", "-c", "trap 'echo got it; exit 4' TERM; echo ready; while true; do sleep 0.02; done"},
      folder.path());
  const auto ready = [&] {
    const std::string out = content_of(folder.path() + "/out");
    return contains(out, "[0] ready") && contains(out, "[1] ready");
  };
  CHECK(wait_until(ready));
  ::kill(pid, SIGTERM);
  CHECK(wait_for(pid) == 4);
  const std::string out = content_of(folder.path() + "/out");
  CHECK(contains(out, "[0] got it"));
  CHECK(contains(out, "[1] got it"));
}

TEST_CASE("launch --grace: ranks have this time between a signal and SIGKILL") {
  struct Row {
    const char* why;
    std::vector<std::string> options;
    int needs_ms;
    bool is_saved;
  };
  const std::vector<Row> rows = {{"the default ends ranks that need longer", {}, 8000, false},
                                 {"a longer time lets them save", {"--grace", "30"}, 6500, true},
                                 {"a shorter one ends them earlier", {"--grace", "1.5"}, 4000, false}};
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const PrivateFolder folder;
    std::vector<std::string> arguments = row.options;
    // The second SIGTERM, a second before the end, must not end a rank that saves.
    const std::string script =
        "trap 'is_asked=1' TERM; echo ready; until [ $is_asked ]; do sleep 0.02; done; "
        "trap '' TERM; sleep " +
        std::to_string(row.needs_ms / 1000.0) + "; echo saved";
    for (const std::string& each :
         {std::string("-n"), std::string("2"), std::string("bash"), std::string("-c"), script})
      arguments.push_back(each);
    const pid_t pid = start_launch(arguments, folder.path());
    CHECK(wait_until([&] {
      const std::string out = content_of(folder.path() + "/out");
      return contains(out, "[0] ready") && contains(out, "[1] ready");
    }));
    const auto begin = std::chrono::steady_clock::now();
    ::kill(pid, SIGTERM);
    CHECK(wait_for(pid) == (row.is_saved ? 0 : 128 + 9));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const std::string out = content_of(folder.path() + "/out");
    for (const char* line : {"[0] saved\n", "[1] saved\n"}) CHECK(contains(out, line) == row.is_saved);
    // Ranks are ended when their time is over, and no earlier; those that are done are not waited for.
    CHECK(seconds >= (row.is_saved ? 6.4 : row.options.empty() ? 4.9 : 1.4));
    CHECK(seconds < (row.is_saved ? 20 : row.options.empty() ? 7.5 : 3.5));
  }
}

TEST_CASE("launch --time-limit: ranks have the time of --grace to save, and those that still ran are named") {
  const LaunchOutcome outcome =
      launch({"-n", "2", "--time-limit", "4", "--grace", "30", "bash", "-c",
              "[ $RANK = 0 ] && exit 0; trap 'sleep 2; echo saved; exit 0' TERM; while true; do sleep 0.02; done"});
  CHECK(outcome.exit_code == 124);
  CHECK(outcome.out == "[1] saved\n");
  CHECK(contains(outcome.err, "launch: not done after 4 s, when rank 1 still ran; the ranks were ended\n"));
}

TEST_CASE("launch: a rank that is stopped for good is ended two seconds after its limit, though nobody waits for it") {
  const ShellOutcome outcome = shell(
      "TESSERA_TIMEOUT=1 tools/launcher/launch -n 2 --restarts 1 bash -c '[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit "
      "0; [ $RANK = 1 ] && kill -STOP $$; exit 0'");
  CHECK(outcome.exit_code == 0);
  CHECK(std::regex_match(
      outcome.output, std::regex("launch: rank 1 was stopped for [3-9] s and then killed; the other ranks were ended; "
                                 "restart 1 of 1 starts, with 2 ranks\n")));
}

TEST_CASE("launch: a wrong limit is left to the ranks") {
  for (const char* limit : {"0", "x", "10000000000", "9223372036854775807"}) {
    CAPTURE(limit);
    const ShellOutcome outcome =
        shell(std::string("TESSERA_TIMEOUT=") + limit + " tools/launcher/launch --no-prefix -n 1 bash -c 'echo done'");
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.output == "done\n");
  }
}

TEST_CASE("launch: a rank that is stopped for less than its limit goes on") {
  const ShellOutcome outcome = shell(
      "TESSERA_TIMEOUT=1 tools/launcher/launch --no-prefix -n 1 bash -c 'for i in 1 2; do (sleep 2; kill -CONT $$) & "
      "kill -STOP $$; done; echo done'");
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.output == "done\n");
}

TEST_CASE("launch: under nohup a closed terminal does not end the job") {
  const std::string job = "tools/launcher/launch --no-prefix -n 1 bash -c 'kill -HUP $PPID; sleep 0.5; echo done'";
  const ShellOutcome ended = shell("exec " + job);
  CHECK(ended.exit_code == 128 + SIGHUP);
  CHECK_FALSE(contains(ended.output, "done"));
  const ShellOutcome outcome = shell("trap '' HUP; exec " + job);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.output == "done\n");
}

TEST_CASE("launch: a parent that ignores SIGCHLD does not keep it from seeing how ranks end") {
  const tessera::Program launcher({"tools/launcher/launch", "-n", "2", "bash", "-c", "exit 5"});
  const pid_t pid = tessera::start_child([&]() -> int {
    ::signal(SIGCHLD, SIG_IGN);
    launcher.exec();
  });
  CHECK(tessera::testing::wait_or_kill(pid) == 5);
}

TEST_CASE("launch: what ranks have left behind, in a session of its own, does not stay a zombie while they run") {
  const LaunchOutcome outcome = launch_script(
      "1",
      "for i in 1 2 3; do (setsid true &); done; sleep 0.5; for i in $(seq 50); do left=$(cat /proc/[0-9]*/stat "
      "2>/dev/null | grep -c \") Z $PPID \"); [ $left = 0 ] && break; sleep 0.1; done; echo $left zombies");
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.out == "[0] 0 zombies\n");
}

TEST_CASE("launch --grace: a rank that fails after a signal ends the others as early as ever") {
  const PrivateFolder folder;
  const pid_t pid = start_launch({"--grace", "60", "-n", "2", "bash", "-c",
                                  "trap '[ $RANK = 1 ] && exit 3' TERM; echo ready; while true; do sleep 0.02; done"},
                                 folder.path());
  CHECK(wait_until([&] {
    const std::string out = content_of(folder.path() + "/out");
    return contains(out, "[0] ready") && contains(out, "[1] ready");
  }));
  const auto begin = std::chrono::steady_clock::now();
  ::kill(pid, SIGTERM);
  CHECK(wait_for(pid) == 3);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(8));
}

TEST_CASE("launch: what a rank started does not outlive a killed launcher") {
  const PrivateFolder folder;
  const std::string pids = folder.path() + "/pids";
  const pid_t pid = start_launch({"-n", "2", "bash", "-c", "sleep 1000 & echo $! >>" + pids + "; wait"}, folder.path());
  const auto started = [&] {
    return std::count(std::istreambuf_iterator<char>(std::ifstream(pids).rdbuf()), {}, '\n') == 2;
  };
  CHECK(wait_until(started));
  ::kill(pid, SIGKILL);
  wait_for(pid);
  std::ifstream file(pids);
  for (pid_t child; file >> child;) CHECK(wait_until([&] { return ::kill(child, 0) != 0; }));
}

TEST_CASE("launch: nothing that a rank started outlives the launcher, in whatever session it is") {
  const PrivateFolder folder;
  const std::string pids = folder.path() + "/pids";
  const LaunchOutcome outcome = launch_script("2", "(setsid sleep 1000 & echo $! >>" + pids + ") >/dev/null 2>&1");
  CHECK(outcome.exit_code == 0);
  int count = 0;
  std::ifstream file(pids);
  for (pid_t child; file >> child; ++count) CHECK(::kill(child, 0) != 0);
  CHECK(count == 2);
}

TEST_CASE("launch: ranks can read that another ended well while they still ran") {
  const LaunchOutcome outcome = launch_script(
      "2",
      "[ $RANK = 1 ] && exit 0; while [ ! -e $TESSERA_STORE.lost.1 ]; do sleep 0.02; done; cat $TESSERA_STORE.lost.1");
  CHECK(outcome.exit_code == 0);
  CHECK(contains(outcome.out, "[0] rank 1 exited with code 0\n"));
}

TEST_CASE("launch: when nobody reads its output any more, the ranks get SIGTERM, and it leaves nothing") {
  const PrivateFolder folder;
  const std::string temporary = folder.path() + "/temporary";
  const std::string ended = folder.path() + "/ended";
  std::filesystem::create_directory(temporary);
  const std::string script = "trap 'touch " + ended + "; exit 1' TERM; while true; do echo line; sleep 0.02; done";
  const std::string command = "TMPDIR=" + temporary + " TEST_TMPDIR= tools/launcher/launch -n 1 -- sh -c \"" + script +
                              "\" 2>/dev/null | head -n 1 > " + folder.path() + "/read";
  CHECK(std::system(command.c_str()) == 0);
  CHECK(content_of(folder.path() + "/read") == "[0] line\n");
  CHECK(wait_until([&] { return std::filesystem::exists(ended); }));
  CHECK(wait_until([&] { return std::filesystem::is_empty(temporary); }));
}

TEST_CASE("run_process_group: ranks do not read what became of the ranks of an earlier job on the same store") {
  const PrivateFolder folder;
  const std::string store = folder.path() + "/store";
  for (const std::string& file : {tessera::lost_rank_file(store), tessera::ended_rank_file(store, 1)}) {
    std::ofstream(file) << "stale";
  }
  const tessera::ProcessGroupResult result = tessera::run_process_group(
      {.command = {"sh", "-c", "! cat $TESSERA_STORE.lost* 2>&1 | grep stale"}, .size = 2, .store_path = store});
  CHECK(result.ok());
}

TEST_CASE("run_process_group: ranks read how another one ended that has filled the disk") {
  struct Row {
    std::string how;
    std::string note;
    std::string text;
  };
  const std::vector<Row> rows = {{"kill -9 $$", "lost", "rank 1 was killed by signal 9"},
                                 {"exit 3", "lost", "rank 1 exited with code 3"},
                                 {"exit 0", "lost.1", "rank 1 exited with code 0"}};
  for (const Row& row : rows) {
    CAPTURE(row.how);
    const SmallDisk disk;
    if (!disk.why_not().empty()) TESSERA_SKIP_MISSING(disk.why_not());
    const std::string note = "$TESSERA_STORE." + row.note;
    const std::string script = "if [ $RANK = 1 ]; then cat /dev/zero >$TESSERA_STORE.filler; " + row.how +
                               "; fi; until [ -e " + note + " ]; do sleep 0.02; done; echo \"$(cat " + note + ")\"";
    std::string read;
    tessera::run_process_group({.command = {"bash", "-c", script},
                                .size = 2,
                                .store_path = disk.path() + "/store",
                                .time_limit = std::chrono::seconds(20),
                                .sinks = {.on_line = [&](int64_t rank, tessera::OutputStream, std::string_view line) {
                                  if (rank == 0) read += line;
                                }}});
    CHECK(read == row.text);
    CHECK_FALSE(std::filesystem::exists(disk.path() + "/store.lost.0.part"));
  }
}

TEST_CASE("run_process_group: a disk that is full at the start is an error that says so") {
  const SmallDisk disk;
  if (!disk.why_not().empty()) TESSERA_SKIP_MISSING(disk.why_not());
  CHECK(std::system(("cat /dev/zero >" + disk.path() + "/filler 2>/dev/null").c_str()) != 0);
  const std::string text = "128 bytes cannot be reserved in " + disk.path() +
                           "/store.lost.part for the note of a rank that ends: No space left on device; free some "
                           "space, or set TMPDIR to another file system";
  CHECK_THROWS_WITH_AS(
      tessera::run_process_group({.command = {"true"}, .size = 1, .store_path = disk.path() + "/store"}), text.c_str(),
      std::runtime_error);
}

TEST_CASE(
    "run_process_group: where this process ignores SIGCHLD, it ends, and says that it cannot know how ranks ended") {
  ::signal(SIGCHLD, SIG_IGN);
  CHECK_THROWS_WITH_AS(tessera::run_process_group({.command = {"true"}, .size = 1}),
                       doctest::Contains("rank 0 has ended, and how is not known (No child processes)"),
                       std::runtime_error);
  ::signal(SIGCHLD, SIG_DFL);
}

TEST_CASE("launch: it raises the limit of open files for many ranks, or says what to do") {
  const std::string many = "timeout 60 tools/launcher/launch -n 60 true";
  CHECK(shell("ulimit -Sn 100; " + many).exit_code == 0);
  const ShellOutcome refused = shell("ulimit -n 100; " + many);
  CHECK(refused.exit_code == 1);
  CHECK(
      contains(refused.output,
               "launch: a pipe for a rank's output cannot be made: Too many open files; each rank needs two open files "
               "of this process: raise their limit (ulimit -Hn"));
}

TEST_CASE(
    "run_process_group: where a rank cannot be started, those before it are ended, in whatever session they are") {
  tessera::ProcessGroupOptions options = {.command = {"setsid", "sleep", "100"}, .size = 2};
  const auto spawn = options.spawn;
  std::vector<pid_t> started;
  options.spawn = [&](const auto& command, const auto& environment, pid_t group) {
    if (!started.empty()) {
      CHECK(wait_until([&] { return ::getpgid(started[0]) != group; }));
      throw std::runtime_error("no more processes");
    }
    const tessera::Child child = spawn(command, environment, group);
    started.push_back(child.pid);
    return child;
  };
  const auto start = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH(tessera::run_process_group(options), "no more processes");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

TEST_CASE("launch --backend mpi: the time limit and signals end it while mpirun starts, and mpirun with it") {
  struct Row {
    std::string why;
    std::string waits;  // what the shell does that stands in for mpirun
    std::vector<std::string> options;
    int signal;
    int code;
    double seconds;  // within which it must end
    std::string text;
  };
  const std::string deaf = "trap '' TERM; while true; do sleep 0.1; done";
  // The last five arguments are the command of a rank's place.
  const std::string late =
      "trap 'OMPI_COMM_WORLD_RANK=0 setsid \"${@: -5}\" >/dev/null 2>&1 & echo $! >>\"$0.pid\"; "
      "sleep 0.3; exit' TERM; while true; do sleep 0.1; done";
  const std::vector<Row> rows = {
      {"the limit passes",
       "sleep 100",
       {"--time-limit", "1"},
       0,
       124,
       4,
       "the time limit of 1 s (--time-limit) passed"},
      {"a signal", "sleep 100", {"--time-limit", "100"}, SIGTERM, 128 + SIGTERM, 4, "signal 15 came"},
      {"Ctrl-C, with restarts", "sleep 100", {"--restarts", "3"}, SIGINT, 128 + SIGINT, 4, "signal 2 came"},
      {"mpirun ignores SIGTERM", deaf, {}, SIGTERM, 128 + SIGTERM, 8, "signal 15 came"},
      {"mpirun starts a place after that", late, {}, SIGTERM, 128 + SIGTERM, 4, "signal 15 came"}};
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const PrivateFolder folder;
    const std::string mpirun = folder.path() + "/mpirun", pids = mpirun + ".pid";
    std::ofstream(mpirun) << "#!/bin/bash\necho it looks for hosts\necho $$ >\"$0.pid\"\n" << row.waits << "\n";
    ::chmod(mpirun.c_str(), 0700);
    const std::string path = std::getenv("PATH");
    ::setenv("PATH", (folder.path() + ":" + path).c_str(), 1);
    std::vector<std::string> arguments = {"-n", "2", "--backend", "mpi"};
    arguments.insert(arguments.end(), row.options.begin(), row.options.end());
    arguments.emplace_back("true");
    int code = 0;
    const double seconds = tessera::testing::seconds_of([&] {
      const pid_t launcher = start_launch(arguments, folder.path());
      CHECK(wait_until([&] { return contains(content_of(pids), "\n"); }));
      if (row.signal != 0) ::kill(launcher, row.signal);
      code = tessera::testing::wait_or_kill(launcher);
    });
    ::setenv("PATH", path.c_str(), 1);
    CHECK(code == row.code);
    CHECK(seconds < row.seconds);
    CHECK(content_of(folder.path() + "/err") ==
          "launch: " + row.text + " before mpirun had started 2 places for ranks; it wrote: it looks for hosts\n\n");
    std::ifstream file(pids);
    for (pid_t pid; file >> pid;) CHECK(wait_until([&] { return ::kill(pid, 0) != 0; }));
  }
}

TEST_CASE("SignalQueue: a signal to a child that has not started its program ends the child, and is not its parent's") {
  // A process has one SignalQueue for its whole life, so this one is not the test's own.
  const pid_t parent = tessera::start_child([] {
    tessera::SignalQueue signals;
    const int code = wait_for(tessera::start_child([] {
      ::raise(SIGTERM);
      return 0;
    }));
    if (code != 1000 + SIGTERM) return 1;
    if (signals.take() != 0) return 2;
    ::raise(SIGTERM);
    return signals.take() == SIGTERM ? 0 : 3;
  });
  CHECK(wait_for(parent) == 0);
}

TEST_CASE("launch: mistakes in its arguments are reported") {
  const LaunchOutcome unknown = launch({"--bogus", "-n", "2", "true"});
  CHECK(unknown.exit_code != 0);
  CHECK(
      contains(unknown.err, "launch: --bogus is no option; see --help, and put the program's own options behind it\n"));
  CHECK(contains(launch({"-n", "2", "-x", "true"}).err, "-x is no option"));
  CHECK(contains(launch({"-n", "1", "--", "no-such-program"}).err, "cannot start no-such-program"));
  CHECK(contains(launch({"-n", "1", "--time-limit", "-1", "true"}).err, "--time-limit"));
  CHECK(launch({"-n", "1", "--time-limit", "-1", "true"}).exit_code != 0);
  CHECK(contains(launch({"-n", "1", "--grace", "0.5", "true"}).err, "--grace: Value 0.5 not in range"));
  CHECK(contains(launch({"-n", "2", "no-such-program"}).err,
                 "[0] cannot start no-such-program: No such file or directory"));
  CHECK(launch({"-n", "2", "no-such-program"}).exit_code == 127);
  CHECK(contains(launch({"-n", "2"}).err, "no program was named"));
  CHECK(contains(launch({"-n", "0", "true"}).err, "0 not in range"));
  CHECK(launch({"-n", "1", "--time-limit", "0.2", "sleep", "100"}).exit_code == 124);
  ::setenv("TESSERA_BACKEND", "nccl", 1);
  const LaunchOutcome named = launch({"-n", "1", "true"}), given = launch({"--backend", "gloo", "-n", "1", "true"});
  ::unsetenv("TESSERA_BACKEND");
  CHECK(named.exit_code == 1);
  CHECK(contains(named.err,
                 "launch: TESSERA_BACKEND is 'nccl', which is no backend for CPU tensors; set it to gloo or "
                 "mpi, unset it, or give --backend\n"));
  CHECK(given.exit_code == 0);
  CHECK(contains(launch({"--backend", "nccl", "-n", "1", "true"}).err, "--backend: nccl not in"));
  CHECK_THROWS_AS(tessera::run_process_group({}), std::invalid_argument);
  CHECK_THROWS_WITH_AS(tessera::run_process_group({.command = {"true"}, .size = -2}),
                       "run_process_group: -2 ranks were asked for; at least 1 is needed", std::invalid_argument);
}
