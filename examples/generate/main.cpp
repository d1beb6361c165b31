// Writes text with a model that examples/train has trained, its weights and its cache cut over the ranks:
//
//   tools/generate RUN --prompt TEXT
//
// docs/generating.md explains it. Alone it is a job of one process.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/random.h"
#include "tessera/examples/generate/generator.h"
#include "tessera/examples/generate/options.h"
#include "tessera/examples/generate/run_folder.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/styles/describe.h"

namespace {

using Clock = std::chrono::steady_clock;

// Writes tokens, which are bytes, to standard output: each as soon as it is known, on rank 0 alone. A closed output
// ends the job.
class Text {
 public:
  Text(tessera::World& world, bool ends_line)
      : world_(world), is_shown_(world.rank() == 0), ends_line_(ends_line || isatty(STDOUT_FILENO) == 1) {}
  // On a terminal the prompt of the shell begins a new line.
  ~Text() {
    if (is_shown_ && ends_line_) std::cout << std::endl;
  }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;

  void write(int64_t token) {
    if (!is_shown_) return;
    world_.guard("generate", [&] {
      std::cout << static_cast<char>(token) << std::flush;
      if (!std::cout) throw std::runtime_error("standard output cannot be written");
    });
  }

 private:
  tessera::World& world_;
  bool is_shown_;
  bool ends_line_;
};

// Writes one line for each rank to standard error. Communication: one all_gather of 16 bytes.
void show_statistics(const tessera::DeviceMesh& mesh, torch::nn::Module& model, int64_t cache_bytes, int64_t tokens,
                     double seconds) {
  const tessera::Description weights = tessera::describe(model);
  const at::Tensor here = torch::tensor({weights.bytes_here(), cache_bytes}, torch::kLong).to(mesh.device());
  const at::Tensor all = tessera::all_gather(here, mesh, 0).view({-1, 2}).cpu();
  if (mesh.world().rank() != 0) return;
  std::cerr << fmt::format("\n{} tokens, {:.3f} ms each; the prompt is part of the first\n", tokens,
                           1e3 * seconds / static_cast<double>(std::max<int64_t>(tokens, 1)));
  std::cerr << fmt::format("weights  {:>13} bytes in all\n", weights.bytes_global());
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    std::cerr << fmt::format("rank {:<3} {:>13} bytes of weights, {} of keys and values\n", rank,
                             all[rank][0].item<int64_t>(), all[rank][1].item<int64_t>());
  }
}

void run(const ProgramOptions& options, const std::shared_ptr<tessera::World>& world) {
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {  // mpirun and srun leave it to the program
    at::set_num_threads(std::max(1, at::get_num_threads() / static_cast<int>(world->local_size())));
  }
  const tessera::DeviceMesh mesh = tessera::init_device_mesh(options.device, {world->size()}, {"tp"}, world);
  const Run folder = open_run(options.run, options.step, mesh);
  std::vector<int64_t> prompt;
  tessera::Agreement({mesh}, "generate")
      .run([&] { prompt = prompt_tokens(options, folder.options.vocabulary); },
           [&] { return fmt::format("{}", fmt::join(prompt, " ")); },
           "the ranks read different prompts; all of them need the same file");
  ParallelTransformer model = load_model(folder.options, folder.checkpoint, folder.dtype, options.scalar_type(), mesh);
  tessera::manual_seed(options.seed, *world);  // after the model, whose first values are drawn too

  Generator generator([&](const at::Tensor& ids, KeyValueCache* cache) { return model(ids, cache); },
                      folder.options.sequence, mesh);
  int64_t tokens = 0;
  const Clock::time_point begin = Clock::now();
  {
    Text text(*world, options.ends_line);
    generator.generate(prompt, options.generate, [&](int64_t token) {
      text.write(token);
      ++tokens;
    });
  }
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  if (options.shows_statistics) {
    show_statistics(mesh, *model.handle(), generator.cache_bytes_here(), tokens, seconds.count());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto world = tessera::World::from_environment();
    ProgramOptions options;
    CLI::App app("Writes text with a model that tools/train has trained, on any number of ranks", "tools/generate");
    add_options(app, options);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      // Every rank has the same arguments, so only rank 0 prints the error or the help.
      return world->rank() == 0 ? app.exit(error) : error.get_exit_code();
    }
    run(options, world);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << std::endl;
    return 1;
  }
}
