"""Reads files with the format's own library, for safetensors_oracle_test.

    python read_with_python.py FOLDER COUNT

FOLDER holds the files 0 to COUNT - 1. Prints a line of JSON for each of them: {"accepted": false}, or true with
"metadata", with "tensors" (by name: the dtype, the shape and the data in hexadecimal digits, or "no bools" for a BOOL
with other bytes than 0 and 1), and with "stricter": the classes of STRICTER to which the file belongs.
"""

import json
import math
import pathlib
import struct
import sys

import safetensors

FIELDS = ["dtype", "shape", "data_offsets"]
DTYPES = {
    "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E8M0": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}


class Object(list):
    """The pairs of key and value of an object of JSON, in their order, also those that a key has twice."""


def has_twice(pairs: Object) -> bool:
    return len({key for key, _ in pairs}) < len(pairs)


class Header:
    """The parts of a header that the library has accepted, so that each field has its type."""

    def __init__(self, text: bytes):
        self.text = text
        self.top = json.loads(text, object_pairs_hook=Object)
        self.metadata = [value for key, value in self.top if key == "__metadata__"]
        self.values = [value for key, value in self.top if key != "__metadata__"]
        # The library takes a list for an object whose fields have these names, in this order.
        self.tensors = [v if isinstance(v, Object) else Object(zip(FIELDS, v)) for v in self.values]

    def fields(self, name: str) -> list:
        return [value for tensor in self.tensors for key, value in tensor if key == name]


def too_large(header: Header) -> bool:
    """Says whether an int64 cannot hold a number, or the bytes of a shape in which a 0 counts as 1."""
    for tensor in header.tensors:
        fields = dict(tensor)
        bytes_ = DTYPES.get(str(fields["dtype"]), 1) * math.prod(max(size, 1) for size in fields["shape"])
        if max([bytes_, *fields["shape"], *fields["data_offsets"]]) > 2**63 - 1:
            return True
    return False


# Where Tessera's reader refuses what the library accepts: the rule by which a file is known, and why.
STRICTER = {
    # "The header data MUST begin with a { character", says the format. The library lets white space stand before it.
    "begins with white space": lambda header: header.text[:1] != b"{",
    # "Duplicate keys are disallowed", says the format. The library takes the last tensor of a name, and the last value
    # of a key of __metadata__, so that two readers may see two files.
    "a name twice": lambda header: has_twice(header.top) or any(has_twice(each or []) for each in header.metadata),
    # The format says that __metadata__ is a map of strings.
    "null for metadata": lambda header: None in header.metadata,
    # The format knows no other fields: whoever wrote one meant something by it, which would be lost.
    "another field": lambda header: any(key not in FIELDS for tensor in header.tensors for key, _ in tensor),
    # The format says that a tensor is an object and its dtype a string. The library's parser takes a list of the fields
    # and an object with the name of the dtype for the same.
    "a list for an object": lambda header: any(not isinstance(value, Object) for value in header.values)
    or any(not isinstance(dtype, str) for dtype in header.fields("dtype")),
    # LibTorch has no elements of 4 and of 6 bits, and Tessera does not know the dtypes named FNUZ, of GPUs of AMD.
    "another dtype": lambda header: any(isinstance(d, str) and d not in DTYPES for d in header.fields("dtype")),
    # LibTorch's operators take up to 64 dimensions.
    "more than 64 dimensions": lambda header: any(len(shape) > 64 for shape in header.fields("shape")),
    # LibTorch counts sizes and strides in int64, and an empty tensor has strides too. The library counts in uint64, and
    # multiplies with the 0.
    "numbers too large": too_large,
}


def hexadecimal(dtype: str, data: bytes) -> str:
    return "no bools" if dtype == "BOOL" and any(byte > 1 for byte in data) else data.hex()


def outcome(path: pathlib.Path) -> dict:
    content = path.read_bytes()
    try:
        with safetensors.safe_open(path, framework="np") as file:
            names, metadata = sorted(file.keys()), file.metadata()
    except Exception as error:
        return {"accepted": False, "error": str(error)}
    tensors = dict(safetensors.deserialize(content))
    assert sorted(tensors) == names, path
    (length,) = struct.unpack("<Q", content[:8])
    header = Header(content[8 : 8 + length])
    return {
        "accepted": True,
        "metadata": metadata or {},
        "tensors": {n: [t["dtype"], t["shape"], hexadecimal(t["dtype"], t["data"])] for n, t in tensors.items()},
        "stricter": [name for name, belongs in STRICTER.items() if belongs(header)],
    }


def main() -> None:
    folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    for i in range(count):
        print(json.dumps(outcome(folder / str(i))))


if __name__ == "__main__":
    main()
