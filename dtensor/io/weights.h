#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/dtensor/io/weight_rules.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

struct LoadOptions {
  // Maps the module's name of a parameter or buffer to its name in the file; "" leaves that tensor as it is. Without it
  // names are the same.
  std::function<std::string(const std::string& module_name)> rename = {};
  // Says, in the place of `rename`, how tensors of the file become those of the module: other names, and tensors that
  // are transposed, split, fused or permuted. Of each tensor of the file a rank reads the runs of bytes that its piece
  // needs.
  WeightRules rules = {};
  // Lists names of the module that may be missing in the file; `*` stands for any characters, `?` for one. These
  // tensors stay as they are.
  std::vector<std::string> allow_missing = {};
  // Says whether the file may hold tensors that the module does not have.
  bool allow_unexpected = false;
  // Says whether a tensor of another dtype than the module's is converted; otherwise it is an error.
  bool convert_dtype = false;
  // Says whether each piece is written to the module as soon as it is read, so that only one is in memory besides it. A
  // disk error then leaves the module partly loaded; what the headers show is still checked on every rank before.
  bool in_place = false;
  // Is called on this rank after each tensor, with the bytes of this rank's pieces read so far and in total.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
};

// Loads a safetensors checkpoint into the parameters and buffers of `module`, plain tensors and DTensors alike.
//
// `path` is a .safetensors file, a .safetensors.index.json, or a folder that holds model.safetensors or
// model.safetensors.index.json. For a file that does not exist, its index (path + ".index.json") is used if that
// exists. A tensor that the module has under several names is expected once, under any of them; the first name that the
// file has counts. Several tensors may be renamed to one in the file. Entries called `_extra_state`, which other
// engines' layers save, are ignored.
//
// Each rank reads the header and, of the data, only the bytes of its pieces. The module changes only when every rank
// has read everything, so a throw leaves it unchanged (but see in_place); until then the rank holds its pieces twice.
//
// Communication: for each mesh in the module two small agreements along each of its dimensions (each one 40-byte
// all-reduce if nothing failed); none for a module of plain tensors, which every rank loads for itself. Every rank of
// those meshes throws the same, with the text of the lowest rank that failed: std::invalid_argument that lists the
// missing, unexpected, mis-shaped, mis-typed and expanded tensors, rules that match no tensor of the module, tensors of
// the module that no rule matches, and parts of the file's tensors that rules leave out; or says what is wrong with the
// file or that ranks have different rules; std::runtime_error when the system cannot read it. An exception of `rename`
// or `progress` counts as this rank's failure.
void load_weights(torch::nn::Module& module, const std::string& path, const LoadOptions& options = {});

struct SaveOptions {
  // Tensors are put into a file until the next would make its data larger than this; 0 writes one file of any size.
  int64_t max_shard_bytes = 0;
  // Is written into the header's "__metadata__" of every file. Python's transformers library requires "format": "pt".
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

// Saves the global values of all parameters and buffers of `module`. Equal values give byte-equal files, whatever the
// number of ranks. A tensor that the module has under several names is saved once, under the first that was registered,
// parameters before buffers; load_weights finds it. Where another tensor was assigned to a parameter's member of a
// Linear, an Embedding or a named layer, both take that one, which forward reads.
//
// `path` is a .safetensors file or an existing folder (then model.safetensors in it). An existing file of that name
// must be a regular file: a symbolic link is refused, not followed, and so are a pipe, a socket and a device. Where one
// file does not suffice, the files are path without its extension + "-0000i-of-0000n.safetensors", and path +
// ".index.json". Every file is written under a temporary name, synced and renamed; the file that readers open first is
// renamed last. So after a crash at any moment the previous checkpoint still loads. A sharded checkpoint that is
// overwritten keeps its parts until the new index is in place; new parts whose names would collide with those that any
// index in the folder lists are named "...-v2-0000i-of-...", "...-v3-..." and so on.
//
// With DTensors it is collective over their meshes: all ranks call it with equal arguments, each parameter is gathered
// (full_tensor) and freed in turn, and one rank writes: the first of the first mesh's ranks that is in every other mesh
// too. If there is none, as with stages of a pipeline on meshes of their own, the first mesh's first rank writes, and
// gets each parameter of a mesh without it by one all_to_all (redistribute_to); ranks outside a mesh list its
// parameters too. Plain tensors are saved with that rank's values. A module of plain tensors alone is written by every
// caller. On slices of a mesh (mesh["tp"] of {dp, tp}) each slice has its own writer: call it on one of them. Throws,
// alike on every rank, std::invalid_argument on a dtype that the format does not have, an impossible path, an index of
// more than 256 MiB or a mesh of several ranks of a fake world, std::runtime_error when writing fails, or while another
// save to the same path runs on this host and one of the two has several files.
void save_weights(const torch::nn::Module& module, const std::string& path, const SaveOptions& options = {});

}  // namespace tessera
