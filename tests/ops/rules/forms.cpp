#include "tessera/tests/ops/rules/forms.h"

#include <map>
#include <stdexcept>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <unistd.h>

#include "tessera/tests/ops/rules/samples.h"
#include "tessera/tools/launcher/child_process.h"

namespace tessera::testing {
namespace {

// The seed is set for each family, so that samples of one do not change those of another.
std::vector<Sample> all_samples(uint64_t seed) {
  std::vector<Sample> out;
  for (const auto family :
       {view_samples, join_samples, indexing_samples, norm_samples, reduction_samples, matmul_samples, nn_samples,
        convolution_samples, pooling_samples, pointwise_samples, batched_samples}) {
    at::manual_seed(seed);
    for (Sample& sample : family()) out.push_back(std::move(sample));
  }
  for (const rules::RuleEntry& entry : rules::pointwise_rules()) {
    at::manual_seed(seed);
    for (Sample& sample : made_samples(std::string(entry.name))) out.push_back(std::move(sample));
  }
  return out;
}

bool in_scope(const Sample& sample) { return !sample.random && !WholeCall(sample).in_place(); }

}  // namespace

std::vector<Draws> forms() {
  std::map<std::string, Draws> out;
  for (const uint64_t seed : {1, 2}) {
    std::map<std::string, int> seen;
    for (Sample& sample : all_samples(seed)) {
      if (!in_scope(sample)) continue;
      const int which = seen[sample.op]++;
      out[fmt::format("{} {:03}", sample.op, which)].push_back(std::move(sample));
    }
  }
  std::vector<Draws> list;
  for (auto& [key, draws] : out) list.push_back(std::move(draws));
  return list;
}

std::string findings(const Draws& draws) {
  try {
    at::manual_seed(4);
    std::string out;
    for (const rules::Strategy& strategy : missing_strategies(draws)) out += to_string(strategy) + "\n";
    return out;
  } catch (const std::exception& error) {
    return fmt::format("not tried: {}\n", error.what());
  }
}

std::string in_child(const std::function<std::string()>& work) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("in_child: no pipe");
  const pid_t child = start_child([&] {
    use_default_signals();  // a test's handlers would report it
    const std::string text = work();
    for (std::size_t sent = 0; sent < text.size();) {
      const ssize_t n = write(ends[1], text.data() + sent, text.size() - sent);
      if (n <= 0) break;
      sent += static_cast<std::size_t>(n);
    }
    return 0;
  });
  close(ends[1]);
  std::string out;
  std::string buffer(4096, '\0');
  for (ssize_t n = 0; (n = read(ends[0], buffer.data(), buffer.size())) > 0;)
    out.append(buffer, 0, static_cast<std::size_t>(n));
  close(ends[0]);
  const int code = wait_for(child);
  return code > 1000 ? fmt::format("ended by signal {}\n", code - 1000) : out;
}

}  // namespace tessera::testing
