"""Prints the public names of PyTorch's DTensor and their parameters as JSON: {MODULE: {NAME: [PARAMETER, ...]}}.

It reads the sources of the torch package in the environment of this Python, and imports none of them, which would take
seconds. A module's names are those of `__all__`, of its own file and of its public submodules that are no packages;
torch.distributed.checkpoint has no `__all__`, so there they are what the package imports. The public members of
`CLASSES` count as names too. Parameters that begin with an underscore are left out. Of torch.distributed itself there
are the functions with which a training program starts, ends and speaks to other ranks, `FUNCTIONS`.
"""

import ast
import json
import pathlib
import sysconfig

TORCH = pathlib.Path(sysconfig.get_paths()["purelib"]) / "torch"
MODULES = [
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.debug",
    "torch.distributed.checkpoint",
]
CLASSES = ["DTensor", "DeviceMesh", "CommDebugMode"]
FUNCTIONS = [
    "init_process_group",
    "is_initialized",
    "destroy_process_group",
    "get_rank",
    "get_world_size",
    "barrier",
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "all_gather_object",
]


def file_of(module):
    """Returns the file of a module or package, or None."""
    path = TORCH.parent.joinpath(*module.split("."))
    candidates = [path / "__init__.py", path.with_suffix(".py")]
    return next((each for each in candidates if each.is_file()), None)


def tree_of(module):
    return ast.parse(file_of(module).read_text())


def imports_of(module):
    """Returns {NAME: the module that it is imported from} of the whole file."""
    names = {}
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = node.module or ""
        if node.level:
            package = module if file_of(module).name == "__init__.py" else module.rpartition(".")[0]
            source = f"{package}.{source}".rstrip(".")
        names.update({alias.asname or alias.name: source for alias in node.names})
    return names


def listed_names(module):
    """Returns what `__all__` lists, or None."""
    for node in tree_of(module).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return [ast.literal_eval(each) for each in node.value.elts]
    return None


def definition(module, name):
    """Returns the function or class of that name, which the module defines or imports, or None."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    source = imports_of(module).get(name)
    return definition(source, name) if source and file_of(source) else None


def members(node):
    functions = (each for each in node.body if isinstance(each, ast.FunctionDef))
    return {each.name: each for each in functions}


def parameters(node):
    if isinstance(node, ast.ClassDef):
        node = members(node).get("__init__")
    if node is None:
        return []
    list_of_values = [node.args.vararg] if node.args.vararg else []
    arguments = node.args.posonlyargs + node.args.args + list_of_values + node.args.kwonlyargs
    return [each.arg for each in arguments if each.arg not in ("self", "args") and not each.arg.startswith("_")]


def add_names(names, module, listed):
    for name in listed:
        node = definition(module, name)
        names.setdefault(name, parameters(node))
        if name in CLASSES:
            public = {each: function for each, function in members(node).items() if not each.startswith("_")}
            names.update({f"{name}.{each}": parameters(function) for each, function in public.items()})


def names_of(module):
    names = {}

    listed = listed_names(module)
    if listed is None:
        sources = {name: source for name, source in imports_of(module).items() if not name.startswith("_")}
        listed = [name for name, source in sources.items() if source.startswith("torch.")]
    add_names(names, module, listed)
    if file_of(module).name == "__init__.py":
        for file in sorted(file_of(module).parent.glob("[a-z]*.py")):
            submodule = f"{module}.{file.stem}"
            add_names(names, submodule, listed_names(submodule) or [])
    return names


def all_names():
    """Returns each name with the first module that has it."""
    found = {"torch.distributed": {}}
    add_names(found["torch.distributed"], "torch.distributed.distributed_c10d", FUNCTIONS)
    for module in MODULES:
        seen = {name for names in found.values() for name in names}
        found[module] = {name: value for name, value in names_of(module).items() if name not in seen}
    return found


lines = []
for module, names in all_names().items():
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in names.items())
    lines.append(f"{json.dumps(module)}: {{\n{rows}\n}}")
print("{\n" + ",\n".join(lines) + "\n}")
