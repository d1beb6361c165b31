#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera {

// Returns 'text' in quotes for a message, with control characters as \x1b and so on; a long text (a name in a hostile
// file) is cut.
std::string in_quotes(std::string_view text);

// Returns the tree of `text`, which may be hostile. `file` and `what` begin every message, as "'<file>': <what> ...".
// Throws std::invalid_argument on more than `most_bytes`, on what is no JSON, on lists and objects more than 64 deep in
// each other, which take far more memory than their text, and on a key that an object has twice, of which nlohmann's
// own parser keeps the last.
nlohmann::json parse_unique_json(std::string_view text, std::size_t most_bytes, const std::string& file,
                                 const std::string& what);

// Is the base of parsers of JSON that may be hostile. Every event is an error until a derived class allows it, so
// nothing is built that was not asked for (nlohmann's own tree silently keeps the last of duplicate keys). Handlers
// throw; the parser itself does not recurse.
class StrictJson : public nlohmann::json_sax<nlohmann::json> {
 public:
  // `file` begins every message.
  explicit StrictJson(std::string file) : file_(std::move(file)) {}

  // Parses the whole of `text`. Throws std::invalid_argument "'<file>': <where>: <what>".
  void parse(std::string_view text);

  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("a boolean"); }
  bool number_integer(int64_t value) override { refuse("the negative number " + std::to_string(value)); }
  bool number_unsigned(uint64_t value) override { refuse("the number " + std::to_string(value)); }
  bool number_float(double, const std::string& text) override { refuse("the number " + text); }
  bool string(std::string& value) override { refuse("the string " + in_quotes(value)); }
  bool binary(nlohmann::json::binary_t&) override { refuse("binary data"); }
  bool start_object(std::size_t) override { refuse("an object"); }
  bool key(std::string& name) override { refuse("the key " + in_quotes(name)); }
  bool end_object() override { refuse("the end of an object"); }
  bool start_array(std::size_t) override { refuse("an array"); }
  bool end_array() override { refuse("the end of an array"); }
  bool parse_error(std::size_t position, const std::string& token, const nlohmann::json::exception& error) override;

 protected:
  // Return where in the document the parser is, and what it expects there, for messages: "tensor 'w': shape: expected a
  // list of ...".
  virtual std::string where() const = 0;
  virtual std::string expected() const = 0;

  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void fail(const std::string& what) const;

 private:
  std::string file_;
};

}  // namespace tessera
