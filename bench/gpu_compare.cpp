#include "tessera/bench/gpu_compare.h"

#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::bench {

Compared compare(c10::Device device, int rounds, int calls, const std::function<void()>& ours,
                 const std::function<void()>& plain) {
  constexpr int kWarmUps = 2;
  const auto all_calls = [&](const std::function<void()>& body) {
    for (int i = 0; i < calls; ++i) body();
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  };
  const auto time = [&](const std::function<void()>& body) { return time_calls([&] { all_calls(body); }, 1) / calls; };
  std::vector<double> of_ours, of_plain, ratios;
  for (int round = -kWarmUps; round < rounds; ++round) {
    const double a = time(ours), b = time(plain);
    if (round < 0) continue;
    of_ours.push_back(a);
    of_plain.push_back(b);
    ratios.push_back(a / b);
  }
  return {.ours = figure_of(of_ours), .plain = figure_of(of_plain), .ratio = figure_of(ratios)};
}

}  // namespace tessera::bench
