#include "tessera/dtensor/io/state_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/io/atomic_file.h"
#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/file_descriptor.h"
#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/core/error_text.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// A chunk is still in the processor's cache when it is written after its checksum was computed. Ranks that write into
// one file wait for each other in every write, so that there are few.
constexpr int64_t kChunk = 1 << 20;
constexpr std::chrono::milliseconds kBetweenLooks(2);
constexpr std::chrono::milliseconds kBetweenChecks(250);
constexpr std::chrono::milliseconds kLongestUnknown(5000);  // a failure is known to all ranks by then
constexpr int64_t kLargestPart = 4 * kMaxManifestBytes;     // a block's share takes more than its checksum

std::string part_path(const StateJob& job, int64_t rank) { return fmt::format("{}/.part-{}.json", job.path, rank); }
// A rank that cannot write its part leaves this, so that the first rank need not wait until the limit.
std::string failed_path(const StateJob& job, int64_t rank) { return fmt::format("{}/.failed-{}", job.path, rank); }

std::string path_of(const StateJob& job, std::size_t file) {
  return (fs::path(job.path) / job.files[file].name).string();
}

// Writes this rank's bytes, and sums up their checksums.
class OwnPart {
 public:
  explicit OwnPart(const StateJob& job) : job_(job), files_(job.files.size()), write_back_(job.files.size()) {
    for (std::size_t i = 0; i < job.files.size(); ++i) {
      paths_.push_back(path_of(job, i));
      sums_.emplace_back(job.files[i].bytes, job.block_bytes);
    }
    for (const ShareToWrite& share : job.shares) total_ += share.place.bytes();
  }

  void write() {
    for (std::size_t i = 0; i < job_.files.size() && job_.new_folder; ++i) {
      const std::string& head = job_.files[i].head;
      write_bytes(i, 0, head.data(), static_cast<int64_t>(head.size()));
    }
    for (const ShareToWrite& share : job_.shares) write_share(share);
    for (const FileDescriptor& file : files_) {
      if (file.is_open()) begin_write_back(file, 0, 0);
    }
    for (std::size_t i = 0; i < files_.size(); ++i) {
      if (!files_[i].is_open()) continue;
      if (::fsync(files_[i].get()) != 0) throw_errno("sync", paths_[i]);
      files_[i].close(paths_[i]);
    }
  }

  std::string to_json() {
    nlohmann::json files = nlohmann::json::object();
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      nlohmann::json& list = files[job_.files[i].name] = nlohmann::json::array();
      for (const BlockShare& share : sums_[i].shares()) list.push_back({share.block, share.bytes, share.sum});
    }
    return files.dump();
  }

 private:
  void write_share(const ShareToWrite& share) {
    const TensorToWrite& place = share.place;
    const int64_t element = place.element_bytes;
    const at::Tensor bytes = share.bytes.defined() ? share.bytes : packed(place);
    const auto* data = static_cast<const char*>(bytes.const_data_ptr());
    for_each_run(place.shape, place.tile, place.share, [&](int64_t begin, int64_t count) {
      write_bytes(place.file, place.data_begin + begin * element, data, count * element);
      data += count * element;
    });
    done_ += place.bytes();
    if (job_.progress) job_.progress(done_, total_);
  }

  void write_bytes(std::size_t file, int64_t position, const char* data, int64_t count) {
    if (!files_[file].is_open()) open_file(file);
    for (int64_t done = 0; done < count; done += kChunk) {
      const int64_t here = std::min(kChunk, count - done);
      sums_[file].add(position + done, data + done, here);
      write_at(files_[file], paths_[file], position + done, data + done, here);
      write_back_[file].wrote(files_[file], position + done, here);
    }
  }

  void open_file(std::size_t file) {
    const std::string& path = paths_[file];
    files_[file] = FileDescriptor(::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
    if (files_[file].is_open()) return;
    if (errno == EMFILE) throw_too_many_open(path, files_.size());
    throw_errno("open", path);
  }

  const StateJob& job_;
  std::vector<std::string> paths_;
  std::vector<FileDescriptor> files_;
  std::vector<WriteBack> write_back_;
  std::vector<BlockSums> sums_;
  int64_t done_ = 0;
  int64_t total_ = 0;
};

void write_file(const std::string& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.sync();
  file.publish();
}

// Throws, and fails the job, if the rank has ended without its part.
void check_rank(const StateJob& job, int64_t rank) {
  std::error_code ignored;
  if (!job.world->has_lost({rank}) || fs::exists(part_path(job, rank), ignored)) return;
  const WaitError lost(WaitError::Cause::kLost, fmt::format("while waiting for the part of rank {}", rank), {rank});
  job.world->rethrow_collective_failure("save_training_state", {rank}, lost);
}

// Waits until the rank has left its part. Returns false when it has failed.
bool wait_for_part(const StateJob& job, int64_t rank, std::chrono::steady_clock::time_point limit) {
  std::error_code ignored;
  auto next_check = std::chrono::steady_clock::now();
  while (!fs::exists(part_path(job, rank), ignored)) {
    if (fs::exists(failed_path(job, rank), ignored)) return false;
    job.world->check_alive();
    if (std::chrono::steady_clock::now() >= next_check) {
      check_rank(job, rank);
      next_check = std::chrono::steady_clock::now() + kBetweenChecks;
    }
    if (std::chrono::steady_clock::now() > limit) {
      const std::string text = fmt::format(
          "saving to '{}': rank {} has not written its part within {} s; if it only needs longer, raise "
          "TESSERA_TIMEOUT or WorldOptions::timeout",
          job.path, rank, job.world->timeout().count() / 1000);
      // The rank counts as failed, as in a collective: otherwise wait() would wait as long again for it.
      job.world->fail("save_training_state", text);
      throw std::runtime_error(text);
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  return true;
}

void add_part(const StateJob& job, int64_t rank, std::vector<BlockSums>& sums) {
  const nlohmann::json files = nlohmann::json::parse(read_whole_file(part_path(job, rank), kLargestPart));
  for (std::size_t i = 0; i < sums.size(); ++i) {
    std::vector<BlockShare> shares;
    for (const nlohmann::json& item : files.at(job.files[i].name))
      shares.push_back({item.at(0).get<int64_t>(), item.at(1).get<int64_t>(), item.at(2).get<uint32_t>()});
    sums[i].add(shares);
  }
}

// Joins the parts of all ranks and names the folder, unless a rank has failed: it reports that itself. A folder that
// has no name yet stays as it is, since other ranks may still write into it.
void finish(StateJob& job) {
  const auto limit = std::chrono::steady_clock::now() + job.world->timeout();
  for (const int64_t rank : job.ranks) {
    if (!wait_for_part(job, rank, limit)) return;
  }
  std::vector<BlockSums> sums;
  for (const FilePlan& file : job.files) sums.emplace_back(file.bytes, job.block_bytes);
  for (const int64_t rank : job.ranks) add_part(job, rank, sums);
  for (std::size_t i = 0; i < sums.size(); ++i)
    job.manifest.files.emplace(job.files[i].name, sums[i].checksums(job.files[i].name));
  write_file((fs::path(job.path) / kManifestName).string(), serialize_state_manifest(job.manifest));
  for (const int64_t rank : job.ranks) fs::remove(part_path(job, rank));
  if (job.is_from_gpu) job.world->check_alive();
  job.new_folder->publish();
  job.new_folder.reset();  // removes the state that this one replaces
  keep_newest_steps(job.folder, job.keep, job.manifest.step);
}

// Where the folder is gone, throws the failure of the job. The folder goes only when the first rank has ended or has
// left a save that failed, so whatever this rank could not do in it follows from a failure that is about to be known.
void throw_cause(const StateJob& job) {
  std::error_code error;
  const auto limit = std::chrono::steady_clock::now() + std::min(job.world->timeout(), kLongestUnknown);
  while (!fs::exists(job.path, error) && !error && std::chrono::steady_clock::now() < limit) {
    job.world->check_alive();
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

}  // namespace

at::Tensor packed(const TensorToWrite& place) {
  return place.tensor.contiguous().view({-1}).narrow(0, place.share.first, place.share.last - place.share.first);
}

void create_files(const std::string& path, const std::vector<FilePlan>& files) {
  for (const FilePlan& plan : files) {
    const std::string name = (fs::path(path) / plan.name).string();
    FileDescriptor file(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file.is_open()) throw_errno("create", name);
    if (::ftruncate(file.get(), plan.bytes) != 0) throw_errno("set the size of", name);
    file.close(name);
  }
}

void give_up(const StateJob& job, const std::string& text) {
  const FileDescriptor told(::open(failed_path(job, job.rank).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  // A full disk, for example, keeps this rank from making that file too. The first rank would then wait until the
  // limit, and not know the reason.
  if (!told.is_open()) job.world->fail("save_training_state", text);
}

void write_state(StateJob& job) {
  try {
    OwnPart part(job);
    part.write();
    write_file(part_path(job, job.rank), part.to_json());
  } catch (...) {
    throw_cause(job);
    give_up(job, current_error_text());
    throw;
  }
  if (job.new_folder) finish(job);
}

}  // namespace tessera
