#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// Describes a tensor that is made from tensors of a file, by steps that only move elements. It is a value: it reads
// nothing, and shapes are checked when load_weights knows them.
//
//   from_file("h.*.attn.c_attn.weight").split(1, 0, 3).transpose(0, 1)   // the first third of the columns, transposed
//   fuse(0, {from_file("*.q.weight"), from_file("*.k.weight"), from_file("*.v.weight")})
//   from_file("*.q_proj.weight").unflatten(0, {heads, 2, -1}).transpose(1, 2).flatten(0, 2)   // rows in another order
//
// A negative tensor dimension counts from the end.
class WeightSource {
 public:
  struct Transpose {
    int64_t first;
    int64_t second;
    friend bool operator==(const Transpose&, const Transpose&) = default;
  };
  struct Narrow {
    int64_t tensor_dim;
    int64_t begin;
    int64_t size;
    friend bool operator==(const Narrow&, const Narrow&) = default;
  };
  struct Split {
    int64_t tensor_dim;
    int64_t index;
    int64_t parts;
    friend bool operator==(const Split&, const Split&) = default;
  };
  struct Unflatten {
    int64_t tensor_dim;
    std::vector<int64_t> sizes;
    friend bool operator==(const Unflatten&, const Unflatten&) = default;
  };
  struct Flatten {
    int64_t first;
    int64_t last;
    friend bool operator==(const Flatten&, const Flatten&) = default;
  };
  using Step = std::variant<Transpose, Narrow, Split, Unflatten, Flatten>;

  // Swaps two dimensions.
  WeightSource transpose(int64_t first, int64_t second) const { return then(Transpose{first, second}); }
  // Keeps elements [begin, begin + size) of a dimension.
  WeightSource narrow(int64_t tensor_dim, int64_t begin, int64_t size) const {
    return then(Narrow{tensor_dim, begin, size});
  }
  // Keeps part `index` of `parts` equal parts of a dimension.
  WeightSource split(int64_t tensor_dim, int64_t index, int64_t parts) const {
    return then(Split{tensor_dim, index, parts});
  }
  // Makes several dimensions of one; one of `sizes` may be -1, for what the others leave.
  WeightSource unflatten(int64_t tensor_dim, std::vector<int64_t> sizes) const {
    return then(Unflatten{tensor_dim, std::move(sizes)});
  }
  // Makes one dimension of those from `first` to `last`, both included.
  WeightSource flatten(int64_t first, int64_t last) const { return then(Flatten{first, last}); }

  // Returns the names in files, in order; each may have wildcards (see WeightRule).
  std::vector<std::string> file_names() const;
  // Returns the same description with the wildcards of its names replaced by what `captured` has for them.
  WeightSource filled(const std::vector<std::string>& captured) const;

  // Either this is a tensor of a file, with a name and no parts, or `parts` are joined along `fused_dim`. After that
  // come the steps.
  const std::string& file_name() const { return file_name_; }
  int64_t fused_dim() const { return fused_dim_; }
  const std::vector<WeightSource>& parts() const { return parts_; }
  const std::vector<Step>& steps() const { return steps_; }

  friend bool operator==(const WeightSource&, const WeightSource&) = default;

 private:
  friend WeightSource from_file(std::string name);
  friend WeightSource fuse(int64_t tensor_dim, std::vector<WeightSource> parts);
  WeightSource then(Step step) const;

  std::string file_name_;
  int64_t fused_dim_ = 0;
  std::vector<WeightSource> parts_;
  std::vector<Step> steps_;
};

// Describes a tensor of a file as it is.
WeightSource from_file(std::string name);
// Describes the tensors that `parts` describe, one after the other along a dimension, as torch.cat joins them. Throws
// std::invalid_argument when there are none.
WeightSource fuse(int64_t tensor_dim, std::vector<WeightSource> parts);

// Says where the tensors of a module whose names match a pattern come from. In `module_name` each `*` stands for any
// characters and each `?` for one; those in the names of `source` stand for the same, in order:
//   {"layers.*.norm1.*", from_file("h.*.ln_1.*")}   layers.0.norm1.bias is h.0.ln_1.bias
struct WeightRule {
  std::string module_name;
  WeightSource source;

  friend bool operator==(const WeightRule&, const WeightRule&) = default;
};

// Says how the tensors of a file become those of a module: a value that load_weights is given. For each tensor of the
// module the first rule counts that matches its name and whose tensors the file has. A tensor with several names is
// asked for by its first name, then by the next.
struct WeightRules {
  std::vector<WeightRule> rules;
  // Names tensors of the file that the module does not need, such as masks that another program saved; patterns.
  std::vector<std::string> ignored;

  friend bool operator==(const WeightRules&, const WeightRules&) = default;
};

// Return the C++ that makes the value: `from_file("wte.weight").transpose(0, 1)`; for a rule, its pattern, "<-" and
// that; for rules, a line for each, then one for what is ignored.
std::string to_string(const WeightSource& source);
std::string to_string(const WeightRule& rule);
std::string to_string(const WeightRules& rules);
std::ostream& operator<<(std::ostream& out, const WeightSource& source);
std::ostream& operator<<(std::ostream& out, const WeightRule& rule);

}  // namespace tessera
