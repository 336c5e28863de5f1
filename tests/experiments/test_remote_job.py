"""The script that runs commands on a remote machine, with a python3 that writes down what it is called with."""

import json
import os
import shutil
import subprocess
import sys

from support.paths import ROOT


def test_commands_run_in_the_background_and_return_their_lines(tmp_path):
    stub, keep, back = tmp_path / "bin" / "python3", tmp_path / "keep", tmp_path / "back"
    stub.parent.mkdir()
    stub.write_text(
        f"""#!/bin/sh
line=$(printf "%s|" "$@"); echo "$line" >> {tmp_path}/calls  # at once: two commands may write at the same time
case "$*" in *slow*) while [ ! -f {tmp_path}/go ]; do sleep 0.1; done;; esac
mkdir -p runs/paper/results/lines && echo '{{"row": "'$3'"}}' >> runs/paper/results/lines/$3.jsonl
"""
    )
    stub.chmod(0o755)
    repo, copy = tmp_path / "repo", keep / "repository"
    script = repo / "experiments" / "remote_job.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "experiments" / "remote_job.sh", script)
    names = ["weights/inception.safetensors", "runs/meadow/model.safetensors"]
    names += [f"data/meadow-{domain}.zip" for domain in ("pets", "flowers", "birds", "things", "dogs")]
    for name in names:
        path = tmp_path / "given" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1000))
    subprocess.run(
        ["tar", "czf", tmp_path / "given.tar", "-C", tmp_path / "given", "data", "weights", "runs"], check=True
    )
    whole = (tmp_path / "given.tar").read_bytes()
    env = {"PATH": f"{stub.parent}:{os.environ['PATH']}", "OUT": str(back), "KEEP": str(keep), "WAIT": "0.5"}

    def call(*commands, **more):
        shutil.rmtree(back, ignore_errors=True)
        back.mkdir()
        done = subprocess.run([script, *commands], cwd=repo, env=env | more, check=True, capture_output=True, text=True)
        return done.stdout

    for number, start in enumerate(range(0, len(whole), 5000)):  # a call brings one part
        shutil.rmtree(repo / "runs", ignore_errors=True)
        part = repo / "runs" / "carry" / f"part.{number:03d}"
        part.parent.mkdir(parents=True)
        part.write_bytes(whole[start : start + 5000])
        assert call() == f"== nothing runs here; parts of the upload: {number + 1}\n"
    packages = {"site-packages/plain.py": "", "site-packages/more.pth": "folder", "site-packages/folder/deeper.py": ""}
    for name, text in {"git/HEAD": "a commit", **packages}.items():
        path = repo / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    measure = "cat .git/HEAD >out/commit.txt; echo $PYTHONPATH; false"
    said = call('paper designs --rows 12+12 "24+0, raster order"', measure, "paper slow", WAIT="0.02", MINUTES="8")
    assert "not finished" in said
    (tmp_path / "go").touch()
    said = call()
    assert "not finished" not in said
    assert f"2  {copy}:{copy}/src:{keep}/start\n2  == exit code 1, " in said
    assert (back / "commit.txt").read_text() == "a commit"
    packages = [sys.executable, "-c", "import deeper, plain; print(plain.__file__)"]  # also those of `.pth` files
    found = subprocess.run(packages, env={"PYTHONPATH": f"{keep}/start"}, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == f"{copy}/runs/site-packages/plain.py"
    *first, designs_, slow = (tmp_path / "calls").read_text().splitlines()
    given = "|--features|features|--inception|weights/inception.safetensors|"
    tokenize = "-m|experiments.meadow|tokenize|--tokenizer|meadow|--views|3|"
    assert sorted(first) == sorted([tokenize, f"-m|experiments.paper|reference{given}"])  # at the same time
    before = f"-m|experiments.paper|designs{given}--minutes|"
    after = "|--rows|12+12|24+0, raster order|"
    assert designs_.startswith(before)
    assert designs_.endswith(after)
    assert 0 < float(designs_.removeprefix(before).removesuffix(after)) <= 8
    assert "|slow|" in slow
    (lines,) = back.glob("*.jsonl")
    assert {json.loads(line)["row"] for line in lines.read_text().splitlines()} == {
        "tokenize",
        "reference",
        "designs",
        "slow",
    }
    assert (copy / "meadow").is_dir()  # as `--model meadow` finds it
    assert (copy / "data" / "meadow-dogs.zip").read_bytes() == (tmp_path / "given/data/meadow-dogs.zip").read_bytes()
    other = copy / "runs" / "longer" / "lines"
    other.mkdir(parents=True)
    (other / "a.jsonl").write_text('{"row": "longer"}\n')
    call(RESULTS="runs/longer")
    (lines,) = back.glob("*.jsonl")
    assert lines.read_text() == '{"row": "longer"}\n'
    assert "== paper steps: not begun, " in call("paper steps", MINUTES="0")
    (tmp_path / "go").unlink()  # two lanes: the second command does not wait for the first
    mps = stub.with_name("nvidia-cuda-mps-control")
    mps.write_text(f"#!/bin/sh\necho mps $CUDA_MPS_PIPE_DIRECTORY >> {tmp_path}/calls\n")
    mps.chmod(0o755)
    (tmp_path / "calls").unlink()
    (copy / "runs/tokens/meadow-test").mkdir(parents=True)
    (copy / "runs/tokens/meadow-test/tokens.json").touch()
    assert "2  == paper steps: " in call("paper slow", "paper steps", "paper attention", LANES="2", WAIT="0.05")
    (tmp_path / "go").touch()
    call()
    started, *verbs, stopped = [line.split("|")[:3] for line in (tmp_path / "calls").read_text().splitlines()]
    assert started == stopped == [f"mps {keep}/mps"]
    assert sorted(verbs[:2]) == [["-m", "experiments.paper", "slow"], ["-m", "experiments.paper", "steps"]]
    assert verbs[2] == ["-m", "experiments.paper", "attention"]
