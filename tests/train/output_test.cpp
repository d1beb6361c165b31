// Tests what the program writes, the progress line, metrics.jsonl and report.html, and the lock of a run's folder.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/examples/train/metrics.h"
#include "tessera/examples/train/printable.h"
#include "tessera/examples/train/progress.h"
#include "tessera/examples/train/replace_file.h"
#include "tessera/examples/train/report.h"
#include "tessera/examples/train/run_lock.h"
#include "tessera/inspect/timeline.h"
#include "tessera/inspect/visualize.h"
#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

using train::Metric;
using train::Progress;
using train::Report;

const Progress::Clock::time_point kStart;
const std::string kUp = "\x1b[1A\x1b[2K";

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

int flock_error = 0;  // is not 0 where the file system has no locks

}  // namespace

// Takes the place of the C library's.
extern "C" __attribute__((visibility("default"))) int flock(int fd, int operation) noexcept {
  if (flock_error == 0) return static_cast<int>(::syscall(SYS_flock, fd, operation));
  errno = flock_error;
  return -1;
}

TEST_CASE("progress: plain lines have the step, the loss, tokens per second and the time left") {
  std::ostringstream out;
  Progress progress(out, {.first_step = 10, .steps = 110, .tokens_per_step = 200}, kStart);
  progress.show(20, 3.25, kStart + std::chrono::seconds(4));
  progress.say("a remark");
  progress.show(30, 3.0, kStart + std::chrono::seconds(2000));
  CHECK(out.str() ==
        "step 20/110  loss 3.2500  500 tokens/s  0:36 left\n"
        "a remark\n"
        "step 30/110  loss 3.0000  2 tokens/s  2:13:20 left\n");
}

TEST_CASE("progress: on a terminal one line changes, remarks stay above it, and it is cut to the width") {
  std::ostringstream out;
  Progress progress(out, {.is_line = true, .columns = 21, .steps = 2, .tokens_per_step = 1}, kStart);
  progress.show(1, 3.25, kStart + std::chrono::seconds(1));
  progress.say("a remark");
  progress.show(2, 3.0, kStart + std::chrono::seconds(2));
  CHECK(out.str() ==
        "step 1/2  loss 3.250\n" + kUp + "a remark\nstep 1/2  loss 3.250\n" + kUp + "step 2/2  loss 3.000\n");
}

TEST_CASE("progress: what a choice means where standard output is no terminal") {
  CHECK(train::is_progress_line("line"));
  CHECK(!train::is_progress_line("plain"));
}

TEST_CASE("metrics: lines are written, read, and dropped where a run goes on before them") {
  const tessera::PrivateFolder folder;
  const std::string path = folder.path() + "/metrics.jsonl";
  const Metric step{.step = 1,
                    .tokens = 64,
                    .loss = 0.1,
                    .bits_per_byte = {},
                    .tokens_per_second = 5.5,
                    .learning_rate = 1e-3,
                    .gradient_norm = 2};
  const Metric look{.step = 2, .tokens = 128, .loss = 0.5, .bits_per_byte = 0.72};
  {
    train::MetricsFile file(path, 0, 2);
    file.add(step);
    file.add(look);
  }
  CHECK(read_file(path) ==
        "{\"step\":1,\"loss\":0.1,\"tokens\":64,\"tokens_per_second\":5.5,\"learning_rate\":0.001,\"gradient_norm\":2."
        "0}\n"
        "{\"step\":2,\"tokens\":128,\"validation_loss\":0.5,\"bits_per_byte\":0.72}\n");
  std::ofstream(path, std::ios::app) << "{\"step\":3,\"los";  // the program was killed here
  const std::vector<Metric> read = train::read_metrics(path);
  REQUIRE(read.size() == 2);
  CHECK(read[0].gradient_norm == 2);
  CHECK(read[1].bits_per_byte == 0.72);
  { const train::MetricsFile file(path, 2, 3); }
  CHECK(train::read_metrics(path).size() == 2);
  { const train::MetricsFile file(path, 2, 2); }  // the evaluation at the end is made again
  CHECK(train::read_metrics(path).size() == 1);
  { const train::MetricsFile file(path, 1, 2); }
  CHECK(train::read_metrics(path).size() == 1);
  CHECK(read_file(path).ends_with("\"gradient_norm\":2.0}\n"));
  std::ofstream(path, std::ios::app) << "nonsense\n";
  CHECK_THROWS_WITH_AS(train::read_metrics(path), doctest::Contains("nonsense"), std::invalid_argument);
  CHECK(train::read_metrics(folder.path() + "/none").empty());
}

TEST_CASE("replace_file: what cannot be written names the system's reason, and leaves the old file and no part") {
  const tessera::PrivateFolder folder;
  const std::string path = folder.path() + "/x";
  train::replace_file(path, "old");
  std::filesystem::create_symlink("/dev/full", path + ".new");
  CHECK_THROWS_WITH_AS(train::replace_file(path, "new"),
                       ("cannot write '" + path + "': No space left on device").c_str(), std::runtime_error);
  CHECK(read_file(path) == "old");
  CHECK(!std::filesystem::is_symlink(path + ".new"));
  CHECK_THROWS_WITH_AS(train::replace_file(folder.path() + "/none/x", "new"),
                       doctest::Contains("/none/x': No such file or directory"), std::runtime_error);
  CHECK_THROWS_WITH_AS(train::replace_file(folder.path(), "new"), doctest::Contains("': Is a directory"),
                       std::runtime_error);
  CHECK(!std::filesystem::exists(folder.path() + ".new"));
}

TEST_CASE("run lock: a folder has one holder, and keeps nothing of one that ends") {
  const tessera::PrivateFolder folder;
  const std::string run = folder.path() + "/runs/one";
  {
    const train::RunLock held(run);
    CHECK(std::filesystem::exists(run + "/.lock"));
    CHECK_THROWS_WITH_AS(
        const train::RunLock other(run),
        ("another process is training in this folder: '" + run + "'; wait until it ends, or give another --run")
            .c_str(),
        std::invalid_argument);
    CHECK(std::filesystem::exists(run + "/.lock"));
  }
  CHECK(!std::filesystem::exists(run));
  std::filesystem::create_directories(run);
  { const train::RunLock again(run); }
  CHECK(std::filesystem::is_empty(run));
  {
    const train::RunLock again(run);
    std::ofstream(run + "/config.ini") << "steps=3\n";
  }
  CHECK(std::filesystem::exists(run + "/config.ini"));
  CHECK(!std::filesystem::exists(run + "/.lock"));
}

TEST_CASE("run lock: a file system without locks does not stop a run") {
  const tessera::PrivateFolder folder;
  for (const int error : {ENOLCK, ENOTSUP, EOPNOTSUPP, ENOSYS}) {
    CAPTURE(error);
    flock_error = error;
    CHECK_NOTHROW([&] { const train::RunLock one(folder.path()), other(folder.path()); }());
    flock_error = 0;
  }
}

TEST_CASE("metrics: a line that cannot be written names the system's reason") {
  const tessera::PrivateFolder folder;
  const std::string path = folder.path() + "/metrics.jsonl";
  train::MetricsFile file(path, 0, 2);
  // The file that is open is replaced by the full device in its own place.
  const int full = ::open("/dev/full", O_WRONLY);
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone) == path) {
      ::dup2(full, std::stoi(entry.path().filename().string()));
    }
  }
  ::close(full);
  CHECK_THROWS_WITH_AS(file.add({.step = 1, .tokens = 64, .loss = 0.1}),
                       ("cannot write '" + path + "': No space left on device").c_str(), std::runtime_error);
}

TEST_CASE("report: no two marks of the tokens are the same") {
  struct Row {
    int64_t tokens;
    std::vector<std::string> marks;
  };
  const std::vector<Row> rows = {
      {2560, {"0", "640", "1280", "1920", "2560"}},
      {1, {"0", "0.25", "0.5", "0.75", "1"}},
      {4000, {"0k", "1k", "2k", "3k", "4k"}},
      {2'048'000, {"0k", "512k", "1024k", "1536k", "2048k"}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.tokens);
    Report report;
    report.metrics = {{.step = 1, .tokens = row.tokens, .loss = 5.0}};
    const std::string html = train::to_html(report);
    for (const std::string& mark : row.marks) {
      CAPTURE(mark);
      CHECK(html.find("text-anchor='middle'>" + mark + "</text>") != std::string::npos);
    }
  }
}

TEST_CASE("report: it names no other file and no address, and text cannot break it") {
  Report report{.title = "3 steps on {dp: 2}", .outcome = "validation: 2 < 3", .written = "<script>alert(\"\x1b[2J\")"};
  report.metrics = {{.step = 1, .tokens = 1000, .loss = 5.0},
                    {.step = 2, .tokens = 2000, .loss = 3.0},
                    {.step = 2, .tokens = 2000, .loss = 3.1, .bits_per_byte = 4.5}};
  report.collectives = "all_reduce  dp+tp  3  <128>\n";
  report.time_line = tessera::timeline_svg({{.rank = 1, .name = "forward", .begin_ns = 1000, .end_ns = 12001000}});
  const std::string picture = tessera::visualize_svg({8, 6}, tessera::Mesh({2}, {"tp"}), {tessera::Shard(0)});
  report.layouts = {{.parameter = "up.<weight>", .others = 3, .picture = picture},
                    {.parameter = "b", .picture = picture}};
  const std::string html = train::to_html(report);
  for (const std::string absent : {"<script", "http", "src=", "@import", "url(", "\x1b"}) {
    CAPTURE(absent);
    CHECK(html.find(absent) == std::string::npos);
  }
  for (const std::string part :
       {"validation: 2 &lt; 3", "&lt;script&gt;alert(&quot;\\x1b[2J&quot;)", "all_reduce", "dp+tp  3  &lt;128&gt;",
        ">rank 1</text>", "<title>forward, 12.000 ms</title>", "What lies where",
        "<figcaption>up.&lt;weight&gt;, and 3 more of this layout</figcaption>", "<figcaption>b</figcaption><svg width",
        ">[8, 6] on {tp: 2} as [S(0)]</text>", ">0-4</text>"}) {
    CAPTURE(part);
    CHECK(html.find(part) != std::string::npos);
  }
  CHECK(!train::to_html({}).empty());
}

TEST_CASE("printable: bytes that are no text are shown as numbers") {
  CHECK(train::printable("a\tb\n") == "a\tb\n");
  CHECK(train::printable("\x1b[0m\x80\x7f") == "\\x1b[0m\\x80\\x7f");
}
