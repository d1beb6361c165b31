#include "tessera/examples/train/restart.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "tessera/examples/train/replace_file.h"
#include "tessera/mesh/environment.h"

namespace train {
namespace {

tessera::Environment environment() { return tessera::resolve_environment(tessera::process_environment()); }

std::string note_in(const std::string& run) { return run + "/job"; }

bool is_noted(const std::string& run, const tessera::Environment& job) {
  std::ifstream file(note_in(run));
  return file && std::string(std::istreambuf_iterator<char>(file), {}) == job.job_id;
}

}  // namespace

bool is_restart_of(const std::string& run) {
  const tessera::Environment job = environment();
  return job.restart_count > 0 && is_noted(run, job);
}

void note_job(const std::string& run) { replace_file(note_in(run), environment().job_id); }

void forget_job(const std::string& run) {
  std::error_code ignored;
  if (is_noted(run, environment())) std::filesystem::remove(note_in(run), ignored);
}

}  // namespace train
