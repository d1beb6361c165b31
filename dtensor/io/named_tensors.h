#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/mesh/device_mesh.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// Holds a parameter or buffer with every name that its module has for it, in order of registration.
struct ModuleTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
};

// Returns the parameters of a module, then its buffers, each tensor once, in order of registration, without undefined
// ones. Where a parameter of a Linear, an Embedding or a named layer was assigned, returns the assigned tensor in place
// of the registered one, which forward does not read; assigned ones for which none is registered follow the other
// parameters. Throws std::invalid_argument on a tensor that a file cannot hold (sparse, quantized, without data), by
// name.
std::vector<ModuleTensor> module_tensors(const torch::nn::Module& module);

// Returns the meshes of these tensors, each once. Does not throw, so that ranks can agree on what module_tensors does.
std::vector<DeviceMesh> module_meshes(const torch::nn::Module& module);

struct SavedTensor {
  std::string name;
  at::Tensor tensor;
};

// Returns the tensors of `module` under the names that its weights are saved by.
std::vector<SavedTensor> saved_weights(const torch::nn::Module& module);

// Holds what is in a checkpoint.
struct SavedContents {
  std::vector<SavedTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Throws std::invalid_argument on a mesh of several ranks in a fake world, where other ranks' pieces are made up.
void refuse_fake_world(const std::vector<DeviceMesh>& meshes, const char* op);

// Plans the files for `tensors`; see plan_checkpoint.
std::vector<SafetensorsHeader> plan_files(const std::vector<SavedTensor>& tensors, int64_t max_shard_bytes,
                                          const std::map<std::string, std::string>& metadata);

// Saves the global values of the tensors that `find` returns, plain ones and DTensors, as save_weights in weights.h
// describes, with the ranks of `meshes` (those of the DTensors among them). Where `find` throws on some ranks, all
// ranks throw. Communication is counted under `op`, which also starts the messages. `name` is that of the file where
// `path` is a folder.
void save_tensors(const std::function<SavedContents()>& find, const std::vector<DeviceMesh>& meshes,
                  const std::string& path, int64_t max_shard_bytes, const char* op, const char* name = kWeightsName);

// Returns the smallest box around this rank's part of `tensor` (all of a plain tensor). Requires is_held(tensor).
// `name` is for messages: throws std::invalid_argument on a Partial, whose terms no file holds.
TensorBox held_box(const at::Tensor& tensor, const std::string& name);
// Says whether held_box() has values that this rank does not hold, between its own.
bool box_has_gaps(const at::Tensor& tensor);
// Returns those of the box's values that this rank holds.
at::Tensor held_part(const at::Tensor& tensor, const at::Tensor& box_values);
// Says whether this rank holds a part of `tensor`: false outside its mesh.
bool is_held(const at::Tensor& tensor);

// Writes `piece`, from held_part(), into this rank's part of `tensor`, converting dtype and device. Records nothing
// for autograd and does not communicate.
void write_piece(const at::Tensor& tensor, const at::Tensor& piece);

// Returns the first 10 texts with `separator` between them, and " and 3 more" where there are others.
std::string list_texts(const std::vector<std::string>& texts, const char* separator);
// Returns "'a', 'b' and 3 more".
std::string list_names(const std::vector<std::string>& names);

}  // namespace tessera
