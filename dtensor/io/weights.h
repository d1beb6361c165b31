#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

struct LoadOptions {
  // The name in the file of the module's parameter or buffer of this name; "" leaves that tensor as it is. None: the
  // same.
  std::function<std::string(const std::string& module_name)> rename;
  // Names of the module that the file may lack; `*` stands for any characters, `?` for one. They stay as they are.
  std::vector<std::string> allow_missing;
  // Whether the file may hold tensors that nothing in the module asks for.
  bool allow_unexpected = false;
  // Whether a tensor of another dtype than the module's is converted; otherwise it is an error.
  bool convert_dtype = false;
  // Whether pieces are written to the module as they are read, so that only one is in memory beside it. An error of the
  // disk then leaves the module loaded in part; all that headers can tell is checked on every rank before.
  bool in_place = false;
  // Called on this rank after each tensor with the bytes of this rank's pieces read so far and in all.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

// Loads a safetensors checkpoint into the parameters and buffers of `module`, plain tensors and DTensors alike.
//
// `path` is a .safetensors file, a .safetensors.index.json, or a folder that holds model.safetensors or
// model.safetensors.index.json. A file that is not there but whose index is (path + ".index.json") is the index. A
// tensor that the module has under several names is expected once, under any of them; the first that the file has
// counts. Several tensors may be renamed to one in the file. Entries called `_extra_state`, what other engines' layers
// keep of themselves, are passed over.
//
// Each rank reads the header and, of the data, only the bytes of the pieces that it keeps. The module changes only when
// every rank has read everything, so a throw leaves it as it was (but see in_place); until then the rank holds its
// pieces twice.
//
// Communication: for each mesh in the module two small agreements along each of its dimensions (one 40-byte all-reduce
// when all is well); none for a module of plain tensors, which every rank loads for itself. Throws, on every rank of
// those meshes alike and with the text of the first that failed, std::invalid_argument that lists the missing,
// unexpected, mis-shaped and mis-typed tensors, or says what is wrong with the file; std::runtime_error when the system
// cannot read it. An exception of `rename` or `progress` counts as this rank's failure.
void load_weights(torch::nn::Module& module, const std::string& path, const LoadOptions& options = {});

struct SaveOptions {
  // A file takes tensors until the next would make its data larger than this; 0 is one file whatever its size.
  int64_t max_shard_bytes = 0;
  // Goes into the header's "__metadata__" of every file.
  // "format": "pt" is what Python's transformers library asks for.
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

// Saves the global values of all parameters and buffers of `module`: the files are byte-equal for equal values,
// whatever the number of ranks. A tensor that the module has under several names is saved once, under the first that
// was registered, parameters before buffers; load_weights finds it.
//
// `path` is a .safetensors file or an existing folder (then model.safetensors in it). What is there under the file's
// name must be a regular file: a symbolic link is refused, not followed, as are a pipe, a socket and a device. When one
// file does not suffice:
// path without its extension + "-0000i-of-0000n.safetensors" and path + ".index.json". Every file is written beside
// under a temporary name, synced and renamed, the file that readers open last: a crash at any moment leaves what was
// there before loadable. A sharded checkpoint that is written over keeps its parts until the new index is in place, and
// the new ones are named "...-v2-0000i-of-..." when they would collide.
//
// With DTensors it is collective over their meshes: all ranks call it with equal arguments; each parameter is gathered
// and let go in turn (full_tensor), and one rank writes: the first of the first mesh, or the first of it that is in all
// the other meshes too. Plain tensors are that rank's. A module of plain tensors alone is written by whoever calls. On
// slices of a mesh (mesh["tp"] of {dp, tp}) each slice has its own writer: call it on one of them.
// Throws std::invalid_argument on a dtype that the format lacks or a path that cannot be, std::runtime_error when
// writing fails; on every rank alike.
void save_weights(const torch::nn::Module& module, const std::string& path, const SaveOptions& options = {});

}  // namespace tessera
