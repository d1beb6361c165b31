#include "tessera/examples/train/options.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <map>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include "tessera/examples/language_model/whole_number.h"

namespace train {
namespace {

std::string mesh_text(const Options& options) { return fmt::format("dp={},tp={}", options.dp, options.tp); }

// Returns a number of ranks, or 0 where `text` is none.
int64_t ranks_in(const std::string& text) {
  const bool is_number = !text.empty() && text.size() <= 6 &&
                         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  return is_number ? std::stoll(text) : 0;
}

// Reads "dp=2,tp=2" into `options`, and returns what is wrong with it, or nothing. A mesh dimension that is not named
// has one rank.
std::string read_mesh(const std::string& text, Options& options) {
  std::map<std::string, int64_t> sizes;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const std::size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const int64_t ranks = equals == std::string::npos ? 0 : ranks_in(part.substr(equals + 1));
    if ((name != "dp" && name != "tp") || ranks < 1 || !sizes.emplace(name, ranks).second) {
      return fmt::format(
          "'{}' is no mesh: its dimensions are dp, which cuts the batch, and tp, which cuts the layers, "
          "each at most once and of at least 1 rank, as in dp=2,tp=2",
          text);
    }
  }
  if (sizes.empty()) return "the mesh is empty; give one as in dp=2,tp=2";
  options.dp = sizes.contains("dp") ? sizes["dp"] : 1;
  options.tp = sizes.contains("tp") ? sizes["tp"] : 1;
  return "";
}

// A run may be resumed from another folder.
std::string absolute(const std::string& path) {
  return path.empty() ? path : std::filesystem::absolute(path).lexically_normal().string();
}

// `mesh` holds the text of --mesh.
void add_job(CLI::App& app, Options& options, std::string& mesh) {
  app.add_option("--run", options.run,
                 "The run's folder: config.ini, metrics.jsonl, checkpoints/, trace.json, report.html")
      ->configurable(false);
  app.add_flag("--resume", options.is_resumed, "Go on after the newest checkpoint of the run's folder, on any mesh")
      ->configurable(false);
  app.add_option("--data", options.data, "A folder of text, which is all read; by default LibTorch's own headers")
      ->transform(absolute);
  app.add_option("--mesh", mesh, "Ranks that cut the batch (dp) and the layers (tp)")
      ->capture_default_str()
      ->check([&options](const std::string& text) { return read_mesh(text, options); }, "dp=N,tp=N");
  app.add_option("--device", options.device, "What holds the tensors: cpu, or cuda, of which each rank takes one GPU")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_flag("--zero{3}", options.zero,
               "Cut over dp too: --zero=1: what AdamW holds, --zero=2: gradients too, --zero: parameters too")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)  // as of all options; a flag's values would be added
      ->check(CLI::IsMember({"false", "0", "1", "2", "3"}));
  app.add_flag("--dry-run", options.is_dry_run, "Print bytes per rank and collectives per step, and train nothing")
      ->configurable(false);
}

void add_model(CLI::App& app, Options& options) {
  app.add_option("--hidden", options.hidden, "Features of each token; a multiple of --heads")
      ->transform(whole_number(1));
  app.add_option("--layers", options.layers, "Blocks of attention and feed-forward")->transform(whole_number(1));
  app.add_option("--heads", options.heads, "Heads of each attention")->transform(whole_number(1));
  app.add_option("--sequence", options.sequence, "Bytes that the model sees at once")->transform(whole_number(2));
  app.add_flag("--tied", options.is_tied, "The output multiplies by the embedding's weight");
  app.add_option("--dropout", options.dropout, "Probability of dropout")->check(CLI::Range(0.0, 0.99));
}

void add_training(CLI::App& app, Options& options) {
  app.add_option("--dtype", options.dtype,
                 "What layers compute in; parameters are float32, or float64. auto: bfloat16 on a GPU, and where the "
                 "CPU has it")
      ->check(CLI::IsMember({"auto", "float64", "float32", "bfloat16"}));
  app.add_option("--steps", options.steps, "Steps of the whole run")->transform(whole_number(1));
  app.add_option("--stop-at", options.stop_at, "Save and end after this step, as on SIGTERM; 0: at the last one")
      ->transform(whole_number(0))
      ->configurable(false);
  app.add_option("--batch", options.batch, "Sequences of a step, on all ranks together")->transform(whole_number(1));
  app.add_option("--accumulate", options.accumulate, "Micro-batches of a step, one after the other; divides --batch")
      ->transform(whole_number(1));
  app.add_flag("--activation-checkpoint", options.has_activation_checkpoints,
               "Keep each block's input alone, and compute the block again in backward");
  app.add_option("--learning-rate", options.learning_rate, "The highest, after the warm-up")
      ->check(CLI::Range(0.0, 10.0));
  app.add_option("--warm-up", options.warm_up, "Steps in which the learning rate rises")->transform(whole_number(0));
  app.add_option("--weight-decay", options.weight_decay, "Of AdamW, on matrices")->check(CLI::Range(0.0, 10.0));
  app.add_option("--clip", options.clip, "The largest norm of a step's gradients; 0: any")->check(CLI::Range(0.0, 1e9));
  app.add_option("--seed", options.seed, "Of first values, dropout and the order of the samples")
      ->transform(whole_number(0));
}

void add_outputs(CLI::App& app, Options& options) {
  app.add_option("--save-every", options.save_every, "Steps between checkpoints; 0: at the end alone")
      ->transform(whole_number(0));
  app.add_option("--keep", options.keep, "The number of checkpoints that stay, the newest; 0: all")
      ->transform(whole_number(0));
  app.add_option("--validate-every", options.validate_every,
                 "Steps between evaluations on held-out text; 0: at the end alone")
      ->transform(whole_number(0));
  app.add_option("--log-every", options.log_every, "Steps between lines of metrics.jsonl")->transform(whole_number(1));
  app.add_option(
         "--check-steps", options.check_steps,
         "Steps of a new training, on the mesh and in one process, whose losses are compared at the end; 0: none")
      ->transform(whole_number(0));
  app.add_option("--progress", options.progress, "How progress is shown: auto, one line that changes, or plain lines")
      ->check(CLI::IsMember({"auto", "line", "plain"}))
      ->configurable(false);
}

// Returns what is wrong with options that are each right, or nothing.
std::string conflict_in(const Options& options) {
  if (options.hidden % options.heads != 0) {
    return fmt::format("--heads {} does not divide --hidden {}", options.heads, options.hidden);
  }
  if (options.batch % options.accumulate != 0) {
    return fmt::format("--accumulate {} does not divide --batch {}", options.accumulate, options.batch);
  }
  for (const double value : {options.learning_rate, options.weight_decay, options.clip, options.dropout}) {
    if (std::isnan(value)) return "--learning-rate, --weight-decay, --clip or --dropout is nan; give a number";
  }
  // CLI11 takes what is behind a # for a comment, within quotes too.
  if (options.data.find_first_of("#\"\n") != std::string::npos) {
    return fmt::format("--data '{}': config.ini cannot hold a path with #, a quote or a line feed; give a link to it",
                       options.data);
  }
  return "";
}

// Returns the names that --help lists.
std::string names_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) names.push_back(option->get_name());
  return fmt::format("the options are {}", fmt::join(names, " "));
}

// Returns what is wrong with the names in the config file, in which CLI11 has found an error.
std::string wrong_name_in_config(const CLI::App& app) {
  const auto file = app.get_config_ptr()->as<std::string>();
  for (const CLI::ConfigItem& item : app.get_config_formatter()->from_file(file)) {
    if (item.name == "++") {
      return fmt::format("'{}' has the section [{}], but options stand in no section; remove that line", file,
                         fmt::join(item.parents, "."));
    }
    if (item.name.empty()) return fmt::format("'{}' has a line that begins with '='; write an option before it", file);
    const CLI::Option* const option = app.get_option_no_throw("--" + item.fullname());
    if (option == nullptr) {
      return fmt::format("'{}' has '{}', which is no option; correct its name, or remove its line", file,
                         item.fullname());
    }
    if (!option->get_configurable()) {
      return fmt::format(
          "'{0}' has '{1}', which such a file cannot give; remove its line, and give --{1} to the program", file,
          item.fullname());
    }
  }
  return fmt::format("'{}' cannot be read as a file of options; write lines such as steps=100", file);
}

void set_failure(Parsed& parsed, int code, const std::string& message) {
  parsed.exit_code = code;
  parsed.message = message;
}

Parsed parse(const std::vector<std::string>& arguments) {
  Parsed parsed;
  std::string mesh = mesh_text(parsed.options);
  CLI::App app("Trains a transformer on bytes of text, on a mesh of ranks", "train");
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.set_config("--config", "", "A file of options, as config.ini of a run's folder is");
  app.get_config_formatter_base()->arrayDelimiter('\n');  // so that blanks and commas are part of a value
  app.allow_config_extras(false);
  add_job(app, parsed.options, mesh);
  add_model(app, parsed.options);
  add_training(app, parsed.options);
  add_outputs(app, parsed.options);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // CLI11 takes the last one first
    parsed.options.zero = std::max<int64_t>(0, parsed.options.zero);            // CLI11 counts a flag that is 0 as -1
    parsed.config = app.config_to_str(/*default_also=*/true);
    const std::string conflict = conflict_in(parsed.options);
    if (!conflict.empty()) set_failure(parsed, 1, "train: " + conflict);
  } catch (const CLI::CallForHelp&) {
    set_failure(parsed, 0, app.help());
  } catch (const CLI::ConfigError&) {
    set_failure(parsed, 1, fmt::format("train: {}\n{}", wrong_name_in_config(app), names_of(app)));
  } catch (const CLI::ExtrasError& error) {
    set_failure(parsed, 1, fmt::format("train: {}\n{}", error.what(), names_of(app)));
  } catch (const CLI::ParseError& error) {
    set_failure(parsed, 1, fmt::format("train: {}", error.what()));
  }
  return parsed;
}

}  // namespace

Parsed parse_options(int argc, const char* const* argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  Parsed parsed = parse(arguments);
  const std::string saved = parsed.options.run + "/config.ini";
  const bool has_config = std::any_of(arguments.begin(), arguments.end(),
                                      [](const std::string& each) { return each.starts_with("--config"); });
  if (!parsed.options.is_resumed || has_config || !std::filesystem::exists(saved)) return parsed;
  arguments.insert(arguments.begin(), {"--config", saved});
  return parse(arguments);
}

}  // namespace train
