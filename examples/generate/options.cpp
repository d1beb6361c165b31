#include "tessera/examples/generate/options.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "tessera/examples/language_model/whole_number.h"

namespace {

std::string read_prompt(const std::string& path) {
  if (std::error_code error; std::filesystem::is_directory(path, error)) {
    throw std::invalid_argument(fmt::format("--prompt-file: '{}' is a folder; name a file of text", path));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file.is_open() && file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  if (!file.is_open() || file.bad() || !text)
    throw std::invalid_argument(fmt::format("--prompt-file: '{}' cannot be read", path));
  if (text.view().empty()) {
    throw std::invalid_argument(
        fmt::format("--prompt-file: '{}' has no text; it must have one byte at least, and be a file that every rank "
                    "can read: ranks "
                    "have no standard input",
                    path));
  }
  return text.str();
}

}  // namespace

void add_options(CLI::App& app, ProgramOptions& options) {
  // A mistaken option is answered with the list of the right ones.
  app.failure_message(CLI::FailureMessage::help);
  // The last value wins, so that users can override what a script passes.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("run", options.run, "A folder that tools/train has written")->required();
  CLI::Option* const prompt = app.add_option("--prompt", options.prompt, "The text to go on with");
  app.add_option("--prompt-file", options.prompt_file, "A file with that text")->excludes(prompt);
  app.add_option("--tokens", options.generate.tokens, "How many tokens to write at most, 256 by default")
      ->transform(whole_number());
  CLI::Option* const temperature =
      app.add_option(
             "--temperature", options.generate.sampling.temperature,
             "0, the default, takes the likeliest token; with 1 tokens are drawn as likely as the model finds them, "
             "with less the likely ones more often")
          ->check(CLI::Range(0.0, 1e6));
  app.add_option(
         "--top-k", options.generate.sampling.top_k,
         "With a temperature above 0, draw from this many of the likeliest tokens; 0, the default, draws from all")
      ->transform(whole_number())
      ->needs(temperature);
  app.add_option("--stop", options.generate.stop,
                 "End before this token, the number of a byte: 10 is the end of a line")
      ->transform(whole_number(0, 255));
  app.add_flag("--end-line", options.ends_line, "End with a line feed, as on a terminal");
  app.add_option("--seed", options.seed,
                 "Decides what is drawn with a temperature above 0: the same text on any number of ranks")
      ->transform(whole_number(0, std::numeric_limits<int64_t>::max()))
      ->needs(temperature);
  app.add_option("--dtype", options.dtype, "float32, the default, or float64: what the weights are converted to")
      ->check(CLI::IsMember({"float32", "float64"}));
  app.add_option("--device", options.device, "cpu, the default, or cuda, of which each rank takes one GPU")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--step", options.step, "Take the checkpoint of this step; by default the newest")
      ->transform(whole_number());
  app.add_flag("--statistics", options.shows_statistics,
               "Write to standard error how long a token took, and what each rank held");
}

std::vector<int64_t> prompt_tokens(const ProgramOptions& options, int64_t vocabulary) {
  const std::string text = options.prompt_file.empty() ? options.prompt : read_prompt(options.prompt_file);
  if (text.empty()) {
    throw std::invalid_argument("there is no prompt; give --prompt TEXT or --prompt-file FILE, one byte at least");
  }
  std::vector<int64_t> tokens;
  for (const char c : text) {
    tokens.push_back(static_cast<unsigned char>(c));
    if (tokens.back() >= vocabulary) {
      throw std::invalid_argument(fmt::format("byte {} of the prompt is {}; the model's tokens are 0 to {}",
                                              tokens.size(), tokens.back(), vocabulary - 1));
    }
  }
  return tokens;
}
