#include "tessera/tools/launcher/mpi_job.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "tessera/tools/launcher/loopback_alone_bytes.h"
#include "tessera/tools/launcher/rank_environment.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{30};
constexpr std::chrono::seconds kEndPatience{3};
constexpr std::chrono::milliseconds kLook{5};

// The shell opens the pipe for which it will wait before it writes its file, and renames the file when it is complete.
constexpr const char* kShell =
    R"(exec 3<"$1/hold"; env -0 >"$1/rank.part.$OMPI_COMM_WORLD_RANK" && )"
    R"(mv "$1/rank.part.$OMPI_COMM_WORLD_RANK" "$1/rank.$OMPI_COMM_WORLD_RANK"; exec cat <&3 >/dev/null)";

bool is_of_mpi(std::string_view variable) {
  return variable.starts_with("OMPI_") || variable.starts_with("PMIX_") || variable.starts_with("PRTE_");
}

std::vector<std::string> mpirun_command(int64_t size, const std::string& folder) {
  return {"mpirun", "--quiet", "--oversubscribe", "--bind-to", "none",
          // Start on this host only, even in a batch system's job.
          "--mca", "plm", "isolated", "--mca", "ras", "^slurm,tm,lsf,gridengine",
          // Do not wait for ranks that end without MPI_Finalize, as those of tests do.
          "--mca", "odls_base_sigkill_timeout", "0",
          // Put mpirun's files into the folder that is removed.
          "--mca", "orte_tmpdir_base", folder, "-np", std::to_string(size), "sh", "-c", kShell, "sh", folder};
}

// Returns the environment for mpirun. It keeps the user's OMPI_MCA_* variables, unless this process itself runs under
// an mpirun, which has set them.
std::vector<std::string> mpirun_environment(const std::string& shared_memory, const std::string& preloaded) {
  std::map<std::string, std::string> variables = environment_without_launchers();
  const bool in_a_job = std::getenv("OMPI_COMM_WORLD_RANK") != nullptr;
  for (char** entry = environ; !in_a_job && entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (text.starts_with("OMPI_MCA_")) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  std::string& preload = variables["LD_PRELOAD"];
  preload = preload.empty() ? preloaded : preloaded + ":" + preload;
  // All ranks are on one host, so none listens on a network interface.
  variables.emplace("OMPI_MCA_btl", "self,vader");
  if (!shared_memory.empty()) variables.emplace("OMPI_MCA_btl_vader_backing_directory", shared_memory);
  // In a container the only user is often root; and mpirun starts only shells that wait.
  variables.emplace("OMPI_ALLOW_RUN_AS_ROOT", "1");
  variables.emplace("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  std::vector<std::string> lines;
  for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
  return lines;
}

// A rank, or mpirun, that is killed leaves its shared memory behind; in a folder of ours it can be removed.
void make_shared_memory(std::optional<PrivateFolder>& folder) {
  try {
    folder.emplace(kSharedMemory);
  } catch (const std::runtime_error&) {
    // Open MPI chooses a place.
  }
}

// Writes the library to a file in memory, since the folder for temporary files may forbid programs.
int make_preloaded() {
  const int fd = ::memfd_create("tessera-loopback-alone", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, kLoopbackAlone, sizeof(kLoopbackAlone)) != ssize_t{sizeof(kLoopbackAlone)}) {
    throw std::runtime_error(
        fmt::format("a file of {} bytes in memory, which mpirun needs to listen on the loopback "
                    "interface alone, cannot be made: {}; use --backend gloo",
                    sizeof(kLoopbackAlone), std::strerror(errno)));
  }
  return fd;
}

int open_hold(const std::string& path) {
  // The pipe is opened for reading and writing, so that neither side waits for the other to open it.
  const int fd = ::mkfifo(path.c_str(), 0600) == 0 ? ::open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) throw std::runtime_error(fmt::format("{}: {}", path, std::strerror(errno)));
  return fd;
}

// Returns what a non-blocking pipe holds.
std::string read_some(int fd) {
  std::string text;
  std::array<char, 4096> buffer;
  for (ssize_t count; (count = ::read(fd, buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
  return text;
}

}  // namespace

bool has_mpirun() {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (::access((folder + "/mpirun").c_str(), X_OK) == 0) return true;
  }
  return false;
}

MpiJob::MpiJob(int64_t size, const WhyOver& why_over)
    : preloaded_(make_preloaded()), hold_(open_hold(folder_.path() + "/hold")) {
  make_shared_memory(shared_memory_);
  const std::string shared_memory = shared_memory_ ? shared_memory_->path() : "";
  const std::string preloaded = fmt::format("/proc/{}/fd/{}", ::getpid(), preloaded_);
  mpirun_ = spawn(mpirun_command(size, folder_.path()), mpirun_environment(shared_memory, preloaded), /*group=*/0);
  try {
    wait_for_places(size, why_over);
  } catch (...) {
    if (!has_ended()) ::kill(-mpirun_.pid, SIGTERM);
    end();
    throw;
  }
}

MpiJob::~MpiJob() { end(); }

std::string MpiJob::file_of(int64_t rank) const { return fmt::format("{}/rank.{}", folder_.path(), rank); }

void MpiJob::wait_for_places(int64_t size, const WhyOver& why_over) {
  Clock::time_point deadline = Clock::now() + kPatience;
  for (int64_t rank = 0; rank < size;) {
    if (std::filesystem::exists(file_of(rank))) {
      ++rank;
      deadline = Clock::now() + kPatience;
      continue;
    }
    if (const std::string why = why_over ? why_over() : ""; !why.empty()) {
      throw std::runtime_error(
          fmt::format("{} before mpirun had started {} places for ranks; it wrote: {}", why, size, output()));
    }
    const bool ended = has_ended();
    if (ended || Clock::now() > deadline) {
      throw std::runtime_error(fmt::format(
          "mpirun {}: it has started {} of {} places for ranks; ranks over MPI need Open MPI's mpirun (Debian's "
          "openmpi-bin), else use --backend gloo; it wrote: {}",
          ended ? "has ended" : "has done nothing for 30 s", rank, size, output()));
    }
    std::this_thread::sleep_for(kLook);
  }
}

bool MpiJob::has_ended() {
  if (mpirun_.pid != 0 && ::waitpid(mpirun_.pid, nullptr, WNOHANG) == mpirun_.pid) mpirun_.pid = 0;
  return mpirun_.pid == 0;
}

// A shell that mpirun starts late does not find the pipe. If it opened one whose last writer had gone, it would wait
// for ever.
void MpiJob::end() {
  ::unlink((folder_.path() + "/hold").c_str());
  ::close(hold_);
  const Clock::time_point deadline = Clock::now() + kEndPatience;
  while (!has_ended() && Clock::now() < deadline) std::this_thread::sleep_for(kLook);
  if (mpirun_.pid != 0) {
    ::kill(-mpirun_.pid, SIGKILL);
    ::waitpid(mpirun_.pid, nullptr, 0);
  }
  ::close(mpirun_.out);
  ::close(mpirun_.err);
  ::close(preloaded_);
}

std::string MpiJob::output() const {
  const std::string text = read_some(mpirun_.out) + read_some(mpirun_.err);
  return text.empty() ? "nothing" : text;
}

std::vector<std::string> MpiJob::new_lines() {
  std::vector<std::string> lines;
  const std::array<int, 2> streams = {mpirun_.out, mpirun_.err};
  for (std::size_t i = 0; i < streams.size(); ++i) {
    std::string& text = begun_[i] += read_some(streams[i]);
    for (std::size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1)) {
      lines.push_back(text.substr(0, end));
    }
  }
  return lines;
}

std::map<std::string, std::string> MpiJob::variables(int64_t rank) const {
  std::map<std::string, std::string> found = {{"TESSERA_BACKEND", "mpi"}};
  std::ifstream file(file_of(rank));
  for (std::string line; std::getline(file, line, '\0');) {
    const std::size_t equals = line.find('=');
    if (is_of_mpi(line) && equals != std::string::npos) found.emplace(line.substr(0, equals), line.substr(equals + 1));
  }
  return found;
}

}  // namespace tessera
