"""The shape of the code base: imports run one way, and every file says what it is."""

import ast

from support.paths import ROOT

SOURCE = ROOT / "src" / "arpg"

# Each may import what stands before it (and its own package). Nothing imports cli.
LAYERS = [
    {"errors"},
    {"files", "settings", "classes"},
    {"config"},
    {"device", "image"},
    {"noise"},
    {"kernels"},
    {"tokenizer", "model"},
    {"quantization"},
    {"text_encoder"},
    {"checkpoint"},
    {"convert"},
    {"hub"},
    {"extractors"},
    {"decode"},
    {"tasks", "figures"},
    {"likelihood"},
    {"pipeline"},
    {"data"},
    {"evaluation"},
    {"train"},
    {"bench", "serve"},
    {"cli"},
]


def imports(path):
    """The arpg modules a file imports, also inside functions; those under TYPE_CHECKING are types only."""
    tree = ast.parse(path.read_text())
    skip = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "arpg":
                yield from (f"arpg.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer(name):
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"{name} has no layer: add it to LAYERS"
    return found[0]


def test_imports_run_one_way():
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for module in imports(path):
            parts = module.split(".")
            if parts[0] != "arpg" or len(parts) == 1 or parts[1] == own:
                continue
            assert layer(parts[1]) < layer(own), f"{path.relative_to(SOURCE)} imports {module}"


def test_files_say_what_they_are():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say what it is"
        assert path.stem not in {"utils", "common", "helpers", "misc"}
