"""Measures PyTorch's DTensor: reads lines "NAME CALLS", answers with microseconds per call. See dispatch.cpp."""

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.distributed.fake_pg import FakeStore


DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def make_tensors():
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (8,))
    shapes = {"a": (8, 8), "b": (8, 8), "right": (8, 8), "bias": (8,), "w1": (16, 8), "w2": (8, 16), "x": (8, 8)}
    places = {"a": Shard(0), "b": Shard(0), "right": Replicate(), "bias": Replicate(), "w1": Shard(0), "w2": Shard(1),
              "x": Replicate()}
    ours = {k: distribute_tensor(torch.randn(s, device=DEVICE), mesh, [places[k]], src_data_rank=None) for k, s in shapes.items()}
    plain = {k: v.to_local() for k, v in ours.items()}
    listed = [distribute_tensor(torch.randn(8, 8, device=DEVICE), mesh, [Shard(0)], src_data_rank=None) for _ in range(100)]
    ours.update(list=listed)
    plain.update(list=[t.to_local() for t in listed])
    return mesh, ours, plain


def mlp_step(t):
    hidden = torch.nn.functional.gelu(torch.mm(t["x"], t["w1"].t()))
    y = torch.mm(hidden, t["w2"].t())
    if isinstance(y, DTensor):
        y = y.redistribute(placements=[Replicate()])
    y.sum().backward()
    t["w1"].grad = t["w2"].grad = None


def five_operators(t):
    torch.tanh(torch.relu(torch.mm(t["a"], t["right"])) * t["b"] + t["a"]).backward(t["b"])
    t["a"].grad = None


def adamw(mesh):
    def made():
        piece = torch.randn(256, 256, device=DEVICE)
        return piece if mesh is None else DTensor.from_local(piece, mesh, [Shard(0)])

    parameters = [torch.nn.Parameter(made()) for _ in range(100)]
    for p in parameters:
        p.grad = made()
    return torch.optim.AdamW(parameters, foreach=False)


def add_of_fresh_plain(t, guard):
    with guard:
        torch.add(t["x"], torch.empty(8, 8, device=DEVICE))


def first_mm(left, right):
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch.mm(left, right)


def add_first_calls(out):
    for shape in ((8,), (2, 4), (2, 2, 2)):
        mesh = init_device_mesh(DEVICE, shape)
        left = distribute_tensor(torch.randn(64, 64, device=DEVICE), mesh, [Shard(0)] * len(shape), src_data_rank=None)
        right = distribute_tensor(torch.randn(64, 64, device=DEVICE), mesh, [Replicate()] * len(shape), src_data_rank=None)
        name = f"first_mm_{len(shape)}d"
        out[name] = (lambda left=left, right=right: first_mm(left, right), False)
        out["plain_" + name] = (lambda a=left.to_local(), b=right.to_local(): torch.mm(a, b), False)


def with_grad(t):
    t = dict(t)
    for k in ("a", "w1", "w2"):
        t[k] = t[k].detach().requires_grad_()
    return t


def calls_of(mesh, ours, plain):
    calls = {
        "add": lambda t: torch.add(t["a"], t["b"]),
        "mm": lambda t: torch.mm(t["a"], t["right"]),
        "view": lambda t: t["a"].view(t["a"].size(0), 2, 4),
        "detach": lambda t: t["a"].detach(),
        "add_": lambda t: t["a"].add_(t["b"]),
        "mul_by_a_number": lambda t: torch.mul(t["a"], 2.0),
        "cat_of_2": lambda t: torch.cat([t["a"], t["b"]], 1),
        "softmax": lambda t: torch.softmax(t["a"], -1),
        "foreach_add_of_100": lambda t: torch._foreach_add(t["list"], t["list"]),
        "layer_norm": lambda t: torch.nn.functional.layer_norm(t["a"], (8,), t["bias"], t["bias"]),
    }
    out = {}
    for name, call in calls.items():
        out[name] = (lambda call=call: call(ours), False)
        out["plain_" + name] = (lambda call=call: call(plain), False)
    for name in ("mm", "layer_norm"):
        out["inference_" + name] = (lambda call=calls[name]: call(ours), "inference")
        out["plain_inference_" + name] = (lambda call=calls[name]: call(plain), "inference")
    out["inference_add_of_fresh_plain"] = (lambda: add_of_fresh_plain(ours, implicit_replication()), "inference")
    out["plain_inference_add_of_fresh_plain"] = (lambda: add_of_fresh_plain(plain, nullcontext()), "inference")
    out["from_local"] = (lambda: DTensor.from_local(plain["a"], mesh, [Shard(0)]), False)
    partial = DTensor.from_local(plain["right"], mesh, [Partial()])
    for name, source, target in (
        ("S(0) to itself", ours["a"], Shard(0)),
        ("R to S(0)", ours["right"], Shard(0)),
        ("S(0) to R", ours["a"], Replicate()),
        ("S(0) to S(1)", ours["a"], Shard(1)),
        ("P to S(0)", partial, Shard(0)),
        ("P to R", partial, Replicate()),
    ):
        out[name.replace(" ", "_")] = (lambda s=source, t=target: s.redistribute(placements=[t]), False)
    ours_grad, plain_grad = with_grad(ours), with_grad(plain)
    out["five_operators_and_back"] = (lambda: five_operators(ours_grad), True)
    out["plain_five_operators_and_back"] = (lambda: five_operators(plain_grad), True)
    steps = adamw(mesh), adamw(None)
    out["adamw_step_of_100"] = (steps[0].step, True)
    out["plain_adamw_step_of_100"] = (steps[1].step, True)
    add_first_calls(out)
    out["mlp"] = (lambda: mlp_step(ours_grad), True)
    out["plain_mlp"] = (lambda: mlp_step(plain_grad), True)
    return out


def main():
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    calls = calls_of(*make_tensors())
    for line in sys.stdin:
        name, count = line.split()
        body, mode = calls[name]
        with torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(mode):
            begin = time.perf_counter()
            for _ in range(int(count)):
                body()
            time_of_all = time.perf_counter() - begin
            if DEVICE != "cpu":
                torch.cuda.synchronize()
            print(time_of_all / int(count) * 1e6, flush=True)


if __name__ == "__main__":
    main()
