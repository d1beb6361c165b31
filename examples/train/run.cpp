#include "tessera/examples/train/run.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/data/global_batches.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/examples/train/checkpoint.h"
#include "tessera/examples/train/comparison.h"
#include "tessera/examples/train/corpus.h"
#include "tessera/examples/train/layouts.h"
#include "tessera/examples/train/metrics.h"
#include "tessera/examples/train/order2.h"
#include "tessera/examples/train/printable.h"
#include "tessera/examples/train/progress.h"
#include "tessera/examples/train/replace_file.h"
#include "tessera/examples/train/report.h"
#include "tessera/examples/train/restart.h"
#include "tessera/examples/train/run_lock.h"
#include "tessera/examples/train/trainer.h"
#include "tessera/examples/train/windows.h"
#include "tessera/inspect/timeline.h"
#include "tessera/inspect/trace.h"
#include "tessera/mesh/core/log.h"
#include "tessera/styles/describe.h"

namespace train {
namespace {

namespace fs = std::filesystem;
using tessera::DeviceMesh;

constexpr double kCloseEnough = 1e-9;
constexpr int64_t kQuickSamples = 64;                         // of held-out text, in a look during training
constexpr int64_t kDrawnRanks = 8;                            // the most in the report's time line
constexpr std::size_t kTracedRecords = std::size_t{1} << 18;  // of a step, which may have more than a World keeps

Identity identity_of(const Options& options, const Corpus& corpus) {
  return {{"data", corpus.hash},
          {"model",
           fmt::format("hidden {}, layers {}, heads {}, sequence {}, dropout {}, {}{}", options.hidden, options.layers,
                       options.heads, options.sequence, options.dropout, options.is_tied ? "tied" : "not tied",
                       compute_dtype(options) == "float64" ? ", float64" : "")},
          {"order of samples", fmt::format("seed {}, batch {}", options.seed, options.batch)}};
}

void check_ranks(const Options& options, const tessera::World& world) {
  if (world.size() == options.ranks()) return;
  throw std::invalid_argument(
      fmt::format("--mesh dp={},tp={} has {} ranks, but the job has {}; start tools/launch -n {}, or give another mesh",
                  options.dp, options.tp, options.ranks(), world.size(), options.ranks()));
}

// Returns the step after which the run goes on: 0 for a new one.
int64_t first_step_of(const Options& options, const Checkpoints& checkpoints) {
  const std::optional<int64_t> newest = checkpoints.newest();
  if (newest && !options.is_resumed && !is_restart_of(options.run)) {
    forget_job(options.run);
    throw std::invalid_argument(
        fmt::format("'{}' has a run; give --resume to go on with it, or another --run", options.run));
  }
  if (!newest && options.is_resumed) {
    throw std::invalid_argument(
        fmt::format("--resume: '{}' has no checkpoint; leave --resume out to begin a run", options.run));
  }
  if (newest && *newest > options.steps) {
    throw std::invalid_argument(fmt::format(
        "--steps {}: the run in '{}' has done {} already; give the number that the whole run is to have, or {} to "
        "evaluate what is there",
        options.steps, options.run, *newest, *newest));
  }
  return newest.value_or(0);
}

std::vector<int64_t> spread(int64_t samples, int64_t most) {
  const int64_t count = std::min(samples, most);
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(i * samples / count);
  return out;
}

std::vector<int64_t> all_samples(const Windows& windows) { return spread(windows.size(), windows.size()); }

// Writes what the library logs as lines that stay, while it lives: on the standard error stream they would be cleared
// by the line that changes.
class LogAboveProgress {
 public:
  explicit LogAboveProgress(Progress& progress) {
    tessera::set_log_sink(
        [&progress](tessera::LogLevel, const std::string& text) { progress.say("tessera: " + text); });
  }
  ~LogAboveProgress() { tessera::set_log_sink({}); }
  LogAboveProgress(const LogAboveProgress&) = delete;
  LogAboveProgress& operator=(const LogAboveProgress&) = delete;
};

// Runs one job. All ranks call its members alike.
class Run {
 public:
  Run(const Parsed& parsed, const DeviceMesh& mesh, Stop stop)
      : options_(parsed.options),
        config_(parsed.config),
        mesh_(mesh),
        host_mesh_(tessera::init_device_mesh("cpu", {options_.dp, options_.tp}, {"dp", "tp"}, mesh.world_ptr())),
        is_first_(mesh.world().rank() == 0),
        stop_(std::move(stop)),
        checkpoints_(options_.run, options_.keep) {}

  int go();

 private:
  void start();
  bool train();
  void after_step(int64_t done, const StepResult& result);
  // Returns the bits per byte of these samples. Throws std::runtime_error, on every rank, where they are not finite.
  double held_out_bits(const std::vector<int64_t>& samples);
  void look_at_held_out(int64_t done);
  StepResult traced_step(int64_t step);
  bool on_any_rank(bool here);
  void save(int64_t done, const StepResult& result);
  int end();
  void write_report(const std::string& outcome, const std::string& written);
  void say(const std::string& text);
  // Runs what only rank 0 does; an exception there ends the job.
  template <class Body>
  void on_first(const char* what, const Body& body) {
    if (is_first_) mesh_.world().guard(what, body);
  }
  int64_t tokens(int64_t steps) const { return steps * options_.batch * options_.sequence; }

  Options options_;
  std::string config_;
  DeviceMesh mesh_;
  DeviceMesh host_mesh_;  // the same ranks on the CPU: what they agree on after a step does not wait for a GPU
  bool is_first_;
  Stop stop_;
  std::optional<RunLock> lock_;  // of rank 0; what writes the folder ends before it
  Checkpoints checkpoints_;

  Corpus corpus_;
  std::optional<Windows> training_, held_out_;
  std::optional<tessera::GlobalBatches> batches_;
  Identity identity_;
  int64_t first_step_ = 0, saved_step_ = -1;
  std::unique_ptr<Trainer> trainer_;
  std::optional<MetricsFile> metrics_;
  std::optional<Progress> progress_;
  std::optional<LogAboveProgress> log_;
  Report report_;
};

void Run::say(const std::string& text) {
  if (!is_first_) return;
  if (progress_) {
    progress_->say(text);
  } else {
    std::cout << text << std::endl;
  }
}

void Run::start() {
  const tessera::Agreement ranks({mesh_}, "train");
  // No rank reads the folder before. Where there is no run to resume, no folder is made.
  ranks.run([&] {
    if (is_first_ && (!options_.is_resumed || fs::exists(options_.run))) lock_.emplace(options_.run);
  });
  ranks.run(
      [&] {
        first_step_ = first_step_of(options_, checkpoints_);
        corpus_ =
            read_corpus(options_.data.empty() ? libtorch_headers() : CorpusFolder{.path = options_.data, .parts = {}});
        training_.emplace(std::move(corpus_.training), options_.sequence);
        held_out_.emplace(std::move(corpus_.held_out), options_.sequence);
      },
      [&] { return fmt::format("{} {} {}", corpus_.hash, first_step_, compute_dtype(options_)); },
      "the ranks read different data or checkpoints, or compute in different dtypes; all of them need the same "
      "folders, and where their hosts' CPUs differ a --dtype");
  say(summary_of(corpus_));
  say(fmt::format("data's hash: {}", corpus_.hash));
  batches_.emplace(training_->size(), options_.batch, static_cast<uint64_t>(options_.seed));
  identity_ = identity_of(options_, corpus_);
  trainer_ = std::make_unique<Trainer>(options_, mesh_);
  if (first_step_ > 0) {
    first_step_ = checkpoints_.load(*trainer_, mesh_, identity_);
    say(fmt::format("goes on after step {}", first_step_));
  }
  on_first("train", [&] {
    fs::create_directories(options_.run);
    note_job(options_.run);
    replace_file(options_.run + "/config.ini", config_);
    metrics_.emplace(options_.run + "/metrics.jsonl", first_step_, options_.steps);
  });
  say(fmt::format("training on {} in {}, into {}", mesh_.to_string(), compute_dtype(options_), options_.run));
  if (is_first_) {
    progress_.emplace(std::cout, ProgressOptions{.is_line = is_progress_line(options_.progress),
                                                 .columns = terminal_columns(),
                                                 .first_step = first_step_,
                                                 .steps = options_.steps,
                                                 .tokens_per_step = tokens(1)});
    if (is_progress_line(options_.progress)) log_.emplace(*progress_);
  }
}

// The first step makes groups and caches, so the second one that this job runs is kept for the report.
StepResult Run::traced_step(int64_t step) {
  if (step != std::min(first_step_ + 1, options_.steps - 1)) return trainer_->step(*training_, *batches_, step);
  tessera::Recorder& recorder = mesh_.world().recorder();
  const std::size_t usual = recorder.capacity();
  recorder.restart(std::max(usual, kTracedRecords));  // the trace begins with this step
  StepResult result = trainer_->step(*training_, *batches_, step);
  report_.collectives = tessera::to_string(tessera::collective_totals(recorder.records()));
  std::vector<tessera::Record> records = tessera::gather_records(mesh_);  // empty but on the first rank
  on_first("trace.json", [&] { replace_file(options_.run + "/trace.json", tessera::chrome_trace(records)); });
  std::erase_if(records, [](const tessera::Record& record) { return record.rank >= kDrawnRanks; });
  if (is_first_) report_.time_line = tessera::timeline_svg(records, {.title = fmt::format("step {}", step + 1)});
  recorder.restart(usual);
  return result;
}

double Run::held_out_bits(const std::vector<int64_t>& samples) {
  const double bits = trainer_->bits_per_byte(*held_out_, samples);
  if (std::isfinite(bits)) return bits;
  throw std::runtime_error(
      fmt::format("the model has {} bits per byte of held-out text; go on after an earlier checkpoint with a lower "
                  "--learning-rate",
                  bits));
}

void Run::look_at_held_out(int64_t done) {
  const double bits = held_out_bits(spread(held_out_->size(), kQuickSamples));
  on_first("metrics", [&] {
    metrics_->add({.step = done, .tokens = tokens(done), .loss = bits * std::numbers::ln2, .bits_per_byte = bits});
  });
  say(fmt::format("after step {}: about {:.3f} bits per byte of held-out text", done, bits));
}

void Run::after_step(int64_t done, const StepResult& result) {
  const bool is_last = done == options_.steps, is_logged = done % options_.log_every == 0 || is_last;
  if (is_logged) check_finite(result, done - 1);
  if (is_first_ && is_logged) {
    on_first("metrics", [&] {
      metrics_->add({.step = done,
                     .tokens = tokens(done),
                     .loss = result.loss.item<double>(),
                     .bits_per_byte = {},
                     .tokens_per_second = progress_->tokens_per_second(done),
                     .learning_rate = result.learning_rate,
                     .gradient_norm = result.gradient_norm.item<double>()});
    });
  }
  // A line for each step would make each step wait for the GPU.
  const bool is_line = is_progress_line(options_.progress) && !mesh_.device().is_cuda();
  if (is_first_ && (is_line || is_logged)) progress_->show(done, result.loss.item<double>());
  if (options_.validate_every > 0 && done % options_.validate_every == 0 && !is_last) {
    check_finite(result, done - 1);
    look_at_held_out(done);
  }
  if (is_last || (options_.save_every > 0 && done % options_.save_every == 0)) save(done, result);
}

void Run::save(int64_t done, const StepResult& result) {
  if (saved_step_ == done) return;
  check_finite(result, done - 1);
  checkpoints_.start(*trainer_, mesh_, done, identity_);
  saved_step_ = done;
}

// Communication: one all-reduce of 8 bytes, so that all ranks stop after the same step.
bool Run::on_any_rank(bool here) {
  const tessera::Placement any = tessera::Partial(tessera::ReduceOp::kMax);
  const at::Tensor flag = at::tensor(static_cast<int64_t>(here), at::kLong);
  return tessera::full_tensor(tessera::from_local(flag, host_mesh_, {any, any})).item<int64_t>() != 0;
}

// Returns whether the run is at its end.
bool Run::train() {
  const int64_t last = options_.stop_at > 0 ? std::min(options_.stop_at, options_.steps) : options_.steps;
  int64_t done = first_step_;
  bool is_stopped = done >= last;
  while (!is_stopped) {
    const StepResult result = traced_step(done);
    after_step(++done, result);
    is_stopped = done == options_.steps || on_any_rank(stop_.is_asked() || done == last);
    if (is_stopped) save(done, result);
  }
  if (done == options_.steps) return true;
  checkpoints_.wait();
  say(fmt::format("stopped after step {}, which is saved; --resume --run {} goes on", done, options_.run));
  return false;
}

void Run::write_report(const std::string& outcome, const std::string& written) {
  report_.title = fmt::format("{} steps on {}", options_.steps, mesh_.mesh().to_string());
  report_.outcome = outcome;
  report_.written = written;
  report_.config = config_;
  report_.weights = tessera::to_string(tessera::describe(trainer_->module()));
  report_.layouts = layouts_of(trainer_->module());
  report_.metrics = read_metrics(options_.run + "/metrics.jsonl");
  replace_file(options_.run + "/report.html", to_html(report_));
}

int Run::end() {
  checkpoints_.wait();
  stop_.on_saved();
  if (on_any_rank(stop_.is_asked())) {
    say(fmt::format("stopped after the last step, which is saved; --resume --run {} evaluates it", options_.run));
    return 0;
  }
  const double bits = held_out_bits(all_samples(*held_out_));
  const std::string written = trainer_->write("#include <", 300, 0.8, static_cast<uint64_t>(options_.seed));
  std::string outcome;
  // The comparison may take long, and is not needed by the report.
  on_first("report", [&] {
    metrics_->add({.step = options_.steps,
                   .tokens = tokens(options_.steps),
                   .loss = bits * std::numbers::ln2,
                   .bits_per_byte = bits});
    outcome = fmt::format("validation: {:.3f} bits per byte (order-2 bytes: {:.3f})", bits,
                          Order2Model(training_->text()).bits_per_byte(held_out_->text()));
    write_report(outcome, written);
  });
  std::optional<Comparison> comparison;
  if (options_.check_steps > 0) comparison = compare_with_one_process(options_, *training_, mesh_);
  // No rank communicates from here on.
  if (!is_first_) return 0;
  if (comparison) {
    outcome += fmt::format(
        "\nlosses of {} steps in float64 differ by {:.1e} from this program on one rank, with dropout, and by {:.1e} "
        "from LibTorch alone, without\nlargest difference from one process: {:.1e}",
        options_.check_steps, comparison->with_dropout, comparison->without_dropout, comparison->largest());
  }
  write_report(outcome, written);
  say(fmt::format("it wrote, after \"#include <\":\n{}\nreport: {}/report.html\n{}", printable(written), options_.run,
                  outcome));
  return !comparison || comparison->largest() <= kCloseEnough ? 0 : 1;
}

int Run::go() {
  start();
  return train() ? end() : 0;
}

}  // namespace

int run(const Parsed& parsed, const std::shared_ptr<tessera::World>& world, const Stop& stop) {
  check_ranks(parsed.options, *world);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {  // mpirun and srun leave it to the program
    at::set_num_threads(std::max(1, at::get_num_threads() / static_cast<int>(world->local_size())));
  }
  const DeviceMesh mesh =
      tessera::init_device_mesh(parsed.options.device, {parsed.options.dp, parsed.options.tp}, {"dp", "tp"}, world);
  return Run(parsed, mesh, stop).go();
}

}  // namespace train
