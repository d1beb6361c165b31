// Trains a transformer on bytes of text, on a mesh of ranks: start it by tools/train, or by tools/launch. With --help
// it lists its options; docs/training.md explains them.

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <iostream>

#include "tessera/examples/train/dry_run.h"
#include "tessera/examples/train/options.h"
#include "tessera/examples/train/run.h"
#include "tessera/mesh/world.h"

namespace {

// A signal handler can reach nothing else.
volatile sig_atomic_t is_stop_asked = 0;

extern "C" void ask_to_stop(int) { is_stop_asked = 1; }

void on_signals(void (*handler)(int)) {
  struct sigaction action = {}, before = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGTERM, SIGINT}) ::sigaction(signal, &action, nullptr);
  // A closed terminal stops the run too, but under nohup it shall go on.
  if (::sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);
}

int train_on_this_rank(int argc, char** argv) {
  try {
    const auto world = tessera::World::from_environment();
    const bool is_first = world->rank() == 0;
    const train::Parsed parsed = train::parse_options(argc, argv);
    if (parsed.exit_code) {
      if (is_first) (*parsed.exit_code == 0 ? std::cout : std::cerr) << parsed.message << std::endl;
      return *parsed.exit_code;
    }
    if (parsed.options.is_dry_run) {
      if (is_first) std::cout << train::dry_run(parsed.options) << std::flush;
      return 0;
    }
    on_signals(ask_to_stop);
    return train::run(parsed, world,
                      {.is_asked = [] { return is_stop_asked != 0; }, .on_saved = [] { on_signals(SIG_DFL); }});
  } catch (const std::exception& error) {
    std::cerr << "train: " << error.what() << std::endl;
    return 1;
  }
}

// tools/train makes the folder of a new run, so that no other run takes its name.
void remove_folder_if_empty() {
  const char* const folder = std::getenv("TESSERA_TRAIN_NEW_RUN");
  if (folder != nullptr) ::rmdir(folder);  // which removes no folder that has something in it
}

}  // namespace

int main(int argc, char** argv) {
  const int exit_code = train_on_this_rank(argc, argv);
  if (exit_code != 0) remove_folder_if_empty();
  return exit_code;
}
