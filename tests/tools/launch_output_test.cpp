// Whatever becomes of those who read its output, the launcher watches its ranks, and ends.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/shell.h"
#include "tessera/tests/harness/text.h"
#include "tessera/tests/tools/launching.h"
#include "tessera/tools/launcher/child_process.h"
#include "tessera/tools/launcher/private_folder.h"

namespace fs = std::filesystem;

using tessera::PrivateFolder;
using tessera::wait_for;
using tessera::testing::contains;
using tessera::testing::content_of;
using tessera::testing::shell;
using tessera::testing::ShellOutcome;
using tessera::testing::start_launch;
using tessera::testing::wait_or_kill;
using tessera::testing::wait_until;

namespace {

// Writes more than every pipe and queue between a rank and its reader can hold, as fast as it can.
const std::string kFlood = "yes 0123456789012345678901234567890123456789";

// Makes "out" in `folder` a pipe that is open for reading while the object lives, and that nobody reads.
class StalledReader {
 public:
  explicit StalledReader(const std::string& folder) {
    const std::string path = folder + "/out";
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    fd_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    REQUIRE(fd_ >= 0);
  }
  ~StalledReader() { ::close(fd_); }
  StalledReader(const StalledReader&) = delete;
  StalledReader& operator=(const StalledReader&) = delete;

  // Reads until the writers have closed the pipe.
  std::string read_all() const {
    ::fcntl(fd_, F_SETFL, 0);
    std::string text, piece(65536, '\0');
    for (ssize_t count; (count = ::read(fd_, piece.data(), piece.size())) > 0;)
      text.append(piece, 0, static_cast<std::size_t>(count));
    return text;
  }

 private:
  int fd_ = -1;
};

// Returns how often `word` is in `text`.
std::size_t count_of(const std::string& text, const std::string& word) {
  std::size_t count = 0;
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + word.size())) ++count;
  return count;
}

}  // namespace

TEST_CASE("launch: when nobody reads its output, the time limit, signals and failures end the job as ever") {
  struct Row {
    std::string why;
    std::vector<std::string> options;
    std::string script;
    int signal;
    int exit_code;
    const char* message;
  };
  const std::vector<Row> rows = {
      {"the limit",
       {"--time-limit", "1"},
       kFlood,
       0,
       124,
       "launch: not done after 1 s, when ranks 0, 1 still ran; the ranks were ended\n"},
      {"bare output", {"--no-prefix", "--time-limit", "1"}, kFlood, 0, 124, "launch: not done after 1 s"},
      {"a signal", {}, "echo ready >&2; exec " + kFlood, SIGTERM, 128 + SIGTERM, "was killed by signal 15"},
      {"a failure", {}, "[ $RANK = 1 ] && sleep 0.5 && exit 7; " + kFlood, 0, 7, "rank 1 exited with code 7"},
      {"a rank that ended well", {}, "echo ready >&2; head -c 300000 /dev/zero", SIGTERM, 128 + SIGTERM, "dropped"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const PrivateFolder folder;
    const StalledReader reader(folder.path());
    std::vector<std::string> arguments = row.options;
    for (const char* each : {"-n", "2", "bash", "-c"}) arguments.emplace_back(each);
    arguments.push_back(row.script);
    const pid_t pid = start_launch(arguments, folder.path());
    const auto is_ready = [&] { return count_of(content_of(folder.path() + "/err"), "ready") == 2; };
    if (row.signal != 0) {
      CHECK(wait_until(is_ready));
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      ::kill(pid, row.signal);
    }
    CHECK(wait_or_kill(pid) == row.exit_code);
    const std::string err = content_of(folder.path() + "/err");
    CHECK(contains(err, row.message));
    CHECK(contains(err, " bytes of output were dropped, since nobody read them\n"));
  }
}

TEST_CASE("launch: ranks wait for a reader that stalls, and nothing is lost when it goes on") {
  const PrivateFolder folder;
  const StalledReader reader(folder.path());
  const std::string written = folder.path() + "/written";
  const pid_t pid = start_launch({"-n", "1", "bash", "-c", "echo >" + written + ".begin; seq 500000; echo >" + written},
                                 folder.path());
  CHECK(wait_until([&] { return fs::exists(written + ".begin"); }));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  CHECK_FALSE(fs::exists(written));
  const std::string text = reader.read_all();
  CHECK(wait_or_kill(pid) == 0);
  std::string expected;
  for (int i = 1; i <= 500000; ++i) expected += "[0] " + std::to_string(i) + "\n";
  const bool is_same = text == expected;
  CHECK(is_same);
}

TEST_CASE("launch: a rank's standard error is read while nobody reads standard output") {
  const PrivateFolder folder;
  const StalledReader reader(folder.path());
  const pid_t pid = start_launch(
      {"-n", "2", "--time-limit", "2", "bash", "-c", "[ $RANK = 0 ] && " + kFlood + "; sleep 1; echo heard >&2"},
      folder.path());
  CHECK(wait_or_kill(pid) == 124);
  CHECK(contains(content_of(folder.path() + "/err"), "[1] heard\n"));
}

TEST_CASE("launch | head -1: ranks are ended and the folder removed, with the exit code of SIGPIPE") {
  const PrivateFolder folder;
  const std::string pids = folder.path() + "/pids", temporary = folder.path() + "/tmp";
  REQUIRE(fs::create_directory(temporary));
  const ShellOutcome outcome =
      shell("env -u TEST_TMPDIR TMPDIR=" + temporary + " bash -c 'timeout 60 tools/launcher/launch -n 2 bash -c " +
            R"("trap \"\" PIPE; echo \$\$ >>)" + pids + R"(; while true; do echo line; sleep 0.01; done" 2>)" +
            folder.path() + R"(/err | head -1; echo "code ${PIPESTATUS[0]}"')");
  CHECK(contains(outcome.output, "line\ncode 141\n"));
  CHECK(contains(content_of(folder.path() + "/err"), "launch: standard output: Broken pipe; the ranks were ended\n"));
  CHECK(fs::is_empty(temporary));
  std::ifstream file(pids);
  int count = 0;
  for (pid_t rank; file >> rank; ++count) CHECK(::kill(rank, 0) != 0);
  CHECK(count == 2);
}

TEST_CASE("launch: output that cannot be written is an error, also where the ranks have ended well") {
  for (const char* program : {"echo hi", "sh -c 'echo hi; sleep 1'"}) {
    CAPTURE(program);
    const ShellOutcome outcome =
        shell(std::string("timeout 20 tools/launcher/launch -n 1 ") + program + " 2>&1 >/dev/full");
    CHECK(outcome.exit_code == 1);
    CHECK(contains(outcome.output, "launch: standard output: No space left on device; the "));
  }
}

TEST_CASE("launch: a reader that has gone does not change the exit code of a rank that has failed") {
  const ShellOutcome outcome = shell(
      "bash -c 'timeout 60 tools/launcher/launch -n 2 bash -c \"[ \\$RANK = 1 ] && exit 7; sleep 1; echo a; sleep 0.5; "
      "echo b; sleep 100\" 2>/dev/null | head -1; echo \"code ${PIPESTATUS[0]}\"'");
  CHECK(contains(outcome.output, "code 7\n"));
}

TEST_CASE("launch: standard streams that are closed take nothing, and nothing else takes their place") {
  const ShellOutcome outcome = shell(
      "timeout 20 tools/launcher/launch -n 2 bash -c 'for i in $(seq 100); do echo out; done; echo err >&2' 2>&1 >&- "
      "<&-");
  CHECK(outcome.exit_code == 0);
  CHECK(contains(outcome.output, "[0] err\n"));
  CHECK(contains(outcome.output, "[1] err\n"));
  CHECK_FALSE(contains(outcome.output, "out"));
}

TEST_CASE("launch: a line without an end is passed on in pieces, and takes little memory") {
  const PrivateFolder folder;
  const std::string memory = folder.path() + "/memory";
  // AddressSanitizer, where the launcher has it, would keep what is freed.
  ::setenv("ASAN_OPTIONS", "quarantine_size_mb=1:detect_leaks=0", 1);
  const pid_t pid = start_launch({"-n", "1", "bash", "-c",
                                  "head -c 120000000 /dev/zero | tr '\\0' x; printf 'y\\n'; awk '/VmHWM/ { print $2 }' "
                                  "/proc/$PPID/status >" +
                                      memory},
                                 folder.path());
  CHECK(wait_for(pid) == 0);
  CHECK(std::stol("0" + content_of(memory)) > 100);
  CHECK(std::stol("0" + content_of(memory)) < 60000);
  std::ifstream out(folder.path() + "/out");
  std::size_t count = 0, longest = 0;
  std::string last;
  for (std::string line; std::getline(out, line); last = line) {
    CHECK(line.starts_with("[0] "));
    count += static_cast<std::size_t>(std::count(line.begin(), line.end(), 'x'));
    longest = std::max(longest, line.size());
  }
  CHECK(count == 120000000);
  CHECK(longest == 4 + 65536);
  CHECK(last.ends_with("xy"));
}

TEST_CASE("launch: signals that come at once all reach the ranks, and none is lost") {
  const PrivateFolder folder;
  const pid_t pid = start_launch(
      {"-n", "1", "bash", "-c",
       "trap 'echo one' USR1; trap 'echo two' USR2; trap 'sleep 0.2; exit 4' TERM; echo ready; while true; do sleep "
       "0.02; done"},
      folder.path());
  CHECK(wait_until([&] { return contains(content_of(folder.path() + "/out"), "ready"); }));
  // A stopped process gets its signals when it goes on, all before its next step.
  ::kill(pid, SIGSTOP);
  for (const int signal : {SIGUSR1, SIGUSR2, SIGTERM}) ::kill(pid, signal);
  ::kill(pid, SIGCONT);
  CHECK(wait_or_kill(pid) == 4);
  for (const char* line : {"[0] one\n", "[0] two\n"}) CHECK(contains(content_of(folder.path() + "/out"), line));
}
