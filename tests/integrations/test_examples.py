"""The notebook runs top to bottom, and the Space is a few lines over the pipeline."""

import ast
import os
import runpy
import sys
import types

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from arpg import Pipeline
from arpg.config import DEFAULT_MODEL
from support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_top_to_bottom(path, tmp_path, monkeypatch):
    """In a kernel of its own, as a user runs them; a cell that raises fails the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4


def test_the_space_shows_images_of_the_chosen_class(monkeypatch):
    path = ROOT / "integrations" / "space" / "app.py"
    made = {}

    def record(name):
        return lambda *arguments, **options: made.setdefault(name, (arguments, options))

    # Records what the interface is made of; gradio itself does not allow the Pillow that is pinned here.
    gradio = types.ModuleType("gradio")
    vars(gradio).update({name: record(name) for name in ("Dropdown", "Slider", "Number", "Gallery", "Interface")})
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    load = Pipeline.from_pretrained
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda name: load(name, device="cpu"))
    runpy.run_path(str(path))
    (generate, inputs, _), _ = made["Interface"]
    names = made["Dropdown"][0][0]
    assert inputs == [made["Dropdown"], made["Slider"], made["Number"]]
    images = generate(names[3], 2.0, 1.0)
    expected = Pipeline.from_pretrained(DEFAULT_MODEL).generate(3, num_images=4, steps=2, seed=1)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(images, expected, strict=True))
    lines = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)}
    assert len(lines) <= 12, "eleven lines and the docstring"
