// Is libFuzzer's target for the subject that FUZZ_SUBJECT names. With the arguments --write-seeds FOLDER it only writes
// the subject's seeds and kept inputs there, and with --keep FOLDER it only keeps the inputs that are there. tools/fuzz
// runs it.

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "tessera/tests/fuzz/kept_inputs.h"
#include "tessera/tests/fuzz/subjects.h"

namespace {

const tessera::fuzz::Subject& chosen() {
  const char* const name = std::getenv("FUZZ_SUBJECT");
  static const tessera::fuzz::Subject& only = tessera::fuzz::subject(name == nullptr ? "" : name);
  return only;
}

void write_seeds(const std::string& folder) {
  std::vector<std::string> seeds = chosen().seeds;
  const std::vector<std::string> kept = tessera::fuzz::read_inputs(tessera::fuzz::kept_file(chosen().name));
  seeds.insert(seeds.end(), kept.begin(), kept.end());
  int i = 0;
  for (const std::string& seed : seeds) {
    std::ofstream(fmt::format("{}/seed{}", folder, i++), std::ios::binary) << seed;
  }
}

void keep(const std::string& folder) {
  std::vector<std::string> inputs;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path(), std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  tessera::fuzz::write_inputs(tessera::fuzz::kept_file(chosen().name), std::move(inputs));
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  const std::string_view task = *argc == 3 ? (*argv)[1] : "";
  if (task != "--write-seeds" && task != "--keep") return 0;
  (task == "--keep" ? keep : write_seeds)((*argv)[2]);
  std::exit(0);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  tessera::fuzz::try_input(chosen(), std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
