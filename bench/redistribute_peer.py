"""Runs the same redistributions with PyTorch's DTensor, one process per rank; redistribute.cpp sends the commands over
a socket.

    case MESH;SHAPE;FROM;TO   ->   ELEMENTS CHECKSUM of this rank's result, or "refused WHY" if PyTorch has no such one
    ours CALLS                ->   microseconds per call
"""

import logging

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import peer_rank

MESHES = {}
# PyTorch refuses any redistribution to Partial with this text. Any other error ends this process, and the benchmark.
REFUSAL = "redistributing to Partial is for internal use only"


def mesh_of(text):
    if text not in MESHES:
        sizes = [int(n) for n in text.split(",")]
        MESHES[text] = DeviceMesh("cpu", torch.arange(torch.Size(sizes).numel()).view(sizes))
    return MESHES[text]


def placement_of(text):
    if text.startswith("S("):
        return Shard(int(text[2:-1]))
    return {"R": Replicate(), "P(sum)": Partial("sum")}[text]


class Case:
    def __init__(self, text):
        mesh_text, shape_text, *ends = text.split(";")
        self.mesh = mesh_of(mesh_text)
        shape = [int(n) for n in shape_text.split(",")]
        source, self.target = ([placement_of(p) for p in end.split()] for end in ends)
        whole = (torch.arange(torch.Size(shape).numel()) % 251).float().view(shape)
        # The pieces of a Partial are the whole tensor on every rank.
        cut = [Replicate() if p.is_partial() else p for p in source]
        local = distribute_tensor(whole, self.mesh, cut, src_data_rank=None).to_local().contiguous()
        self.tensor = DTensor.from_local(local, self.mesh, source, run_check=False, shape=whole.shape, stride=whole.stride())

    def run(self):
        return self.tensor.redistribute(self.mesh, self.target)


def checksum(local):
    """Returns a checksum of the values and their positions. redistribute_rank.cpp computes the same."""
    places = torch.arange(local.numel())
    return (local.flatten().long() * (places * 2654435761 % 1009)).sum().item()


def main():
    logging.getLogger("torch").setLevel(logging.ERROR)  # no warning that it gathers for an all-to-all
    state = {}

    def doing(what, rest):
        if what != "case":
            return peer_rank.microseconds(state["case"].run, int(rest))
        state.clear()
        made = Case(rest)
        try:
            local = made.run().to_local()
        except RuntimeError as error:
            if REFUSAL not in str(error):
                raise
            return f"refused {str(error).splitlines()[0]}"
        state["case"] = made
        return f"{local.numel()} {checksum(local)}"

    peer_rank.serve(doing)


if __name__ == "__main__":
    with torch.no_grad():
        main()
