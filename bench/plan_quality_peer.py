"""Runs PyTorch's own redistribution: reads lines "MESH;SHAPE;FROM;TO" and answers each with the bytes that it moves and
its planner's steps. See plan_quality.cpp.

    2,3;8,12;S(0) P(sum);R S(0)   ->   288 | 1:S(0) 0:R ...   (bytes that rank 0 receives in the collectives which run
                                                              on CPU tensors | mesh dimension : its new placement)
                                       - why                  (PyTorch does not support this redistribution)

No rank receives more than rank 0: torch.chunk's first piece is the largest, and PyTorch pads the others to its size.
"""

import logging
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_group_size_by_name
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached, redistribute_local_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

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


class Received(TorchDispatchMode):
    """Adds up the bytes that this rank receives in collectives."""

    def __init__(self):
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace or func.namespace == "_dtensor":
            self.bytes += self.of(func.__name__, args, out)
        return out

    @staticmethod
    def of(name, args, out):
        if name == "all_gather_into_tensor.default":
            return out.nbytes - args[0].nbytes
        if name == "reduce_scatter_tensor.default":
            return (args[2] - 1) * out.nbytes
        if name == "all_reduce.default":
            ranks = _get_group_size_by_name(args[2])
            return 2 * (ranks - 1) / ranks * out.nbytes
        if name in ("wait_tensor.default", "_wrap_tensor_autograd.default"):
            return 0
        raise AssertionError(f"a collective that is not counted: {name}")


def steps(source, target):
    out = []
    for info in _gen_transform_infos_non_cached(source, target):
        _, after = info.src_dst_placements
        out.append(f"{info.mesh_dim}:{text_of(after)}")
    return " ".join(out)


def local_shape(spec):
    return compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)[0]


def answer(line):
    mesh_text, shape_text, *ends = line.split(";")
    mesh = mesh_of(mesh_text)
    shape = torch.Size(int(n) for n in shape_text.split(","))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)
    source, target = (DTensorSpec(mesh, tuple(placement_of(p) for p in end.split()), tensor_meta=meta) for end in ends)
    local = torch.zeros(local_shape(source))
    with Received() as received:
        result = redistribute_local_tensor(local, source, target)
    assert tuple(result.shape) == tuple(local_shape(target)), f"{line}: a piece of {tuple(result.shape)}"
    return f"{received.bytes:.10g} | {steps(source, target)}"


def main():
    logging.getLogger("torch").setLevel(logging.ERROR)  # no warning that it gathers for an all-to-all
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    for line in sys.stdin:
        try:
            print(answer(line.strip()))
        except (NotImplementedError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            if not isinstance(error, NotImplementedError) and "not supported" not in reason:
                raise
            print("-", reason)


if __name__ == "__main__":
    with torch.no_grad():
        main()
