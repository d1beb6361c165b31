"""Writes from_python.safetensors with the format's own library: one tensor of every dtype that LibTorch has too.

    python tests/dtensor/io/make_python_file.py     # needs torch and safetensors, as tools/setup installs them
"""

import pathlib

import safetensors.torch
import torch

DTYPES = {
    "u64": torch.uint64, "i64": torch.int64, "f64": torch.float64, "c64": torch.complex64, "f32": torch.float32,
    "u32": torch.uint32, "i32": torch.int32, "bf16": torch.bfloat16, "f16": torch.float16, "u16": torch.uint16,
    "i16": torch.int16, "f8_e8m0": torch.float8_e8m0fnu, "f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2,
    "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}


def main() -> None:
    base = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.float32)
    tensors = {name: base.to(dtype) for name, dtype in DTYPES.items()}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors['na"me\\\n\u00e9'] = base.to(torch.uint8)
    target = pathlib.Path(__file__).parent / "from_python.safetensors"
    safetensors.torch.save_file(tensors, target, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
