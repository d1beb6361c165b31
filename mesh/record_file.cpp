#include "tessera/mesh/record_file.h"

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::string_view kStart = "records.";
constexpr std::string_view kEnd = ".jsonl";

Json to_line(const Record& r) {
  return {
      r.sequence, static_cast<int>(r.kind), r.name, r.path, r.begin_ns, r.end_ns, r.op, r.mesh_dim, r.ranks, r.serial,
      r.bytes,    r.waited_from_ns};
}

Record record_of(const Json& line, int64_t rank) {
  Record r;
  r.rank = rank;
  r.sequence = line.at(0).get<uint64_t>();
  const int kind = line.at(1).get<int>();
  if (kind < 0 || kind > static_cast<int>(RecordKind::kSpan)) throw std::out_of_range("a kind of record");
  r.kind = static_cast<RecordKind>(kind);
  r.name = line.at(2).get<std::string>();
  r.path = line.at(3).get<std::string>();
  r.begin_ns = line.at(4).get<int64_t>();
  r.end_ns = line.at(5).get<int64_t>();
  r.op = line.at(6).get<std::string>();
  r.mesh_dim = line.at(7).get<std::string>();
  r.ranks = line.at(8).get<std::vector<int64_t>>();
  r.serial = line.at(9).get<int64_t>();
  r.bytes = line.at(10).get<int64_t>();
  r.waited_from_ns = line.at(11).get<int64_t>();
  return r;
}

Json to_json(const std::vector<CollectiveCount>& counts) {
  Json out = Json::array();
  for (const CollectiveCount& each : counts) out.push_back(Json::array({each.mesh_dim, each.ranks, each.count}));
  return out;
}

// Files of earlier versions have no such counts.
std::vector<CollectiveCount> counts_in(const Json& head) {
  std::vector<CollectiveCount> counts;
  for (const Json& each : head.value("collectives", Json::array())) {
    counts.push_back({.mesh_dim = each.at(0).get<std::string>(),
                      .ranks = each.at(1).get<std::vector<int64_t>>(),
                      .count = each.at(2).get<int64_t>()});
  }
  return counts;
}

// Text of users may hold bytes that are no UTF-8.
std::string dump(const Json& line) { return line.dump(-1, ' ', false, Json::error_handler_t::replace); }

RankRecords read_records(const fs::path& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(fmt::format("{} cannot be read: {}", path.string(), std::strerror(errno)));
  RankRecords out;
  std::string line;
  try {
    std::getline(file, line);
    const Json head = Json::parse(line);
    out.rank = head.at("rank").get<int64_t>();
    out.failure = head.at("failure").get<std::string>();
    out.counts = counts_in(head);
    while (std::getline(file, line)) out.records.push_back(record_of(Json::parse(line), out.rank));
  } catch (const std::exception& error) {
    throw std::runtime_error(fmt::format("{} does not hold a rank's records: {}", path.string(), error.what()));
  }
  return out;
}

std::string text_of(const RankRecords& records) {
  const Json head = {{"rank", records.rank}, {"failure", records.failure}, {"collectives", to_json(records.counts)}};
  std::string out = dump(head) + '\n';
  for (const Record& each : records.records) out += dump(to_line(each)) + '\n';
  return out;
}

// Returns the rank whose file has this name, 3 for "records.3.jsonl", or nullopt for another file's name.
std::optional<int64_t> rank_of(std::string_view name) {
  if (name.size() <= kStart.size() + kEnd.size() || !name.starts_with(kStart) || !name.ends_with(kEnd)) {
    return std::nullopt;
  }
  const std::string_view digits = name.substr(kStart.size(), name.size() - kStart.size() - kEnd.size());
  int64_t rank = -1;
  std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (rank < 0 || std::to_string(rank) != digits) return std::nullopt;
  return rank;
}

// Returns the files of records in a folder, by rank.
std::map<int64_t, fs::path> files_in(const std::string& folder, std::error_code& error) {
  std::map<int64_t, fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    std::error_code ignored;
    const std::optional<int64_t> rank = rank_of(entry.path().filename().string());
    if (rank && !fs::is_directory(entry.symlink_status(ignored))) files.emplace(*rank, entry.path());
  }
  return files;
}

// Makes the folder, for this user alone, unless it is there. Returns "", or why it cannot hold records: another user
// could replace them in a folder that is theirs. Containers often have a folder of root's.
std::string make_folder(const std::string& name) {
  const fs::path folder = fs::path(name + "/").parent_path();  // without slashes at its end
  const fs::path parent = folder.parent_path();
  std::error_code error;
  if (!parent.empty()) fs::create_directories(parent, error);
  if (error) return error.message();
  struct stat status {};
  if (::mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) return std::strerror(errno);
  if (::stat(folder.c_str(), &status) != 0) return std::strerror(errno);
  if (!S_ISDIR(status.st_mode)) return "that is no folder";
  if (status.st_uid == ::geteuid() || status.st_uid == 0 || ::geteuid() == 0) return "";
  return fmt::format("the folder is user {}'s; name one of yours", status.st_uid);
}

// Writes a new file that only this user may read. Returns "" or the system's text.
std::string write_private(const std::string& path, const std::string& text) {
  ::unlink(path.c_str());  // a process of the same number may have been killed while it wrote
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
  FILE* const file = fd < 0 ? nullptr : ::fdopen(fd, "w");
  if (file == nullptr) return std::strerror(errno);
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int reason = errno;
  if (std::fclose(file) == 0 && written) return "";
  return std::strerror(written ? errno : reason);
}

}  // namespace

std::string records_file(const std::string& folder, int64_t rank) {
  return fmt::format("{}/{}{}{}", folder, kStart, rank, kEnd);
}

void write_records(const std::string& folder, const RankRecords& records) {
  const std::string path = records_file(folder, records.rank);
  const std::string part = fmt::format("{}.{}", path, ::getpid());
  std::string reason = make_folder(folder);
  if (reason.empty()) {
    reason = write_private(part, text_of(records));
    if (reason.empty() && std::rename(part.c_str(), path.c_str()) == 0) return;
    if (reason.empty()) reason = std::strerror(errno);
    std::remove(part.c_str());
  }
  throw std::runtime_error(
      fmt::format("the records of rank {} cannot be written to {}: {}", records.rank, path, reason));
}

std::string prepare_records(const std::string& folder, int64_t rank, int64_t size) noexcept {
  try {
    std::string reason = make_folder(folder);
    std::error_code ignored;
    fs::remove(records_file(folder, rank), ignored);
    if (rank != 0) return reason;
    for (const auto& [other, file] : files_in(folder, ignored)) {
      if (other >= size) fs::remove(file, ignored);
    }
    return reason;
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::vector<RankRecords> read_all_records(const std::string& folder) {
  std::vector<RankRecords> all;
  std::error_code error;
  for (const auto& [rank, file] : files_in(folder, error)) all.push_back(read_records(file));
  if (all.empty()) {
    throw std::invalid_argument(
        fmt::format("{} holds no rank's records{}; name the folder that TESSERA_RECORDS named when the job failed, or "
                    "\"restart_1\" in it for those of the first restart",
                    folder, error ? fmt::format(" ({})", error.message()) : ""));
  }
  return all;
}

std::vector<uint8_t> encode_records(const std::vector<Record>& records) {
  Json all = Json::array();
  for (const Record& each : records) all.push_back(to_line(each));
  return Json::to_cbor(all);
}

std::vector<Record> decode_records(const std::vector<uint8_t>& bytes, int64_t rank) {
  std::vector<Record> records;
  const Json all = Json::from_cbor(bytes);
  for (const Json& each : all) records.push_back(record_of(each, rank));
  return records;
}

}  // namespace tessera
