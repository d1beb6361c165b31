#include "tessera/bench/rank_server.h"

#include <exception>

#include "tessera/bench/ranks.h"

namespace tessera::bench {
namespace {

std::string answer_to(const std::string& line, const Doing& doing) {
  const std::size_t blank = line.find(' ');
  try {
    return doing(line.substr(0, blank), blank == std::string::npos ? "" : line.substr(blank + 1));
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return "error " + text.substr(0, text.find('\n'));
  }
}

}  // namespace

void serve(const std::string& socket, const World& world, const Doing& doing) {
  RankLine line(socket, world.rank());
  for (std::string text; line.next(text);) line.answer(answer_to(text, doing));
}

}  // namespace tessera::bench
