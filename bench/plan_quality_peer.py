"""PyTorch's own planner: reads "MESH;SHAPE;FROM;TO" lines, answers each with its steps. See plan_quality.cpp.

    2,3;8,12;S(0) P(sum);R S(0)   ->   1:S(0) 0:R ...   (mesh dimension : what its placement becomes)
                                       - why            (what it does not support)
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached
from torch.testing._internal.distributed.fake_pg import FakeStore

MESHES = {}


def mesh_of(text):
    if text not in MESHES:
        sizes = [int(n) for n in text.split(",")]
        MESHES[text] = DeviceMesh("cpu", torch.arange(torch.Size(sizes).numel()).view(sizes))
    return MESHES[text]


def placement_of(text):
    if text.startswith("S("):
        return Shard(int(text[2:-1]))
    return {"R": Replicate(), "P(sum)": Partial("sum")}[text]


def text_of(placement):
    if placement.is_shard():
        return f"S({placement.dim})"
    return "R" if placement.is_replicate() else "P(sum)"


def steps(line):
    mesh_text, shape_text, *ends = line.split(";")
    mesh = mesh_of(mesh_text)
    shape = torch.Size(int(n) for n in shape_text.split(","))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)
    source, target = (DTensorSpec(mesh, tuple(placement_of(p) for p in end.split()), tensor_meta=meta) for end in ends)
    out = []
    for info in _gen_transform_infos_non_cached(source, target):
        before, after = info.src_dst_placements
        if before.is_shard() and after.is_partial():  # as redistribute_local_tensor refuses it
            return f"- redistribute from {before} to {after} not supported yet"
        out.append(f"{info.mesh_dim}:{text_of(after)}")
    return " ".join(out)


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    for line in sys.stdin:
        try:
            print(steps(line.strip()))
        except (NotImplementedError, RuntimeError, ValueError) as error:
            print("-", str(error).splitlines()[0])


if __name__ == "__main__":
    main()
