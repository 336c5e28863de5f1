"""Images per second that training batches can be read at from many token shards, on disk and in an object store.

    python benchmarks/token_stream.py --out benchmarks/results/token-stream.json

Writes 1,000 shards of random tokens (256 each), reads an epoch of them in shuffled windows, once from local disk and
once from moto's S3 server on loopback (with an empty cache), and notes the memory during the epoch. `--url` reads
shards in a store of your own instead; its credentials come from the usual variables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arpg.bench.record import environment
from arpg.data import open_tokens
from arpg.data.dataset import Dataset, TokenBatches
from arpg.data.tokens import TokenInfo, begin_tokens, finish_tokens, write_shard
from arpg.files import write_json
from arpg.storage import AnyPath, as_path

NEEDED = 1000  # images/s: more than ARPG-L trains at on one NVIDIA H200 (991, benchmarks/results/train-arpg-l.json)
TESTS = Path(__file__).resolve().parent.parent / "tests"
SERVER = """
import sys
from support.object_store import s3_server
with s3_server() as (address, _):
    print(address, flush=True)
    sys.stdin.read()
"""


def write_set(folder: AnyPath, shards: int, images: int) -> None:
    """Write a set of random tokens: ARPG's grid and vocabulary, one view."""
    info = TokenInfo(1, (16, 16), 16384, (), 1000)
    begin_tokens(folder, info)
    rng = np.random.default_rng(0)
    written = []
    for number in range(shards):
        ids = rng.integers(0, info.vocab_size, (images, 1, 256), dtype=np.uint16)
        labels = rng.integers(0, 1000, images, dtype=np.int32)
        written.append(write_shard(folder, info, number, ids, labels))
    finish_tokens(folder, info, written)


def memory() -> dict[str, int]:
    """Return resident megabytes of this process: its own, and with the mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"own MB": int(lines["RssAnon"].split()[0]) >> 10, "with files MB": int(lines["VmRSS"].split()[0]) >> 10}


def read_epoch(folder: AnyPath, *, batch_size: int, shuffle: int) -> dict[str, Any]:
    """Read every image once; the clock starts before the set is opened."""
    began = time.perf_counter()
    tokens = open_tokens(folder)
    options: dict[str, Any] = {"num_classes": 1000, "label_drop": 0.1, "seed": 0, "device": torch.device("cpu")}
    batches = TokenBatches(Dataset(tokens), batch_size=batch_size, parts=1, shuffle=shuffle, **options)
    steps = tokens.num_images // batch_size
    noted = []
    for step in range(steps):
        batches.batch(step, 0)
        if step % max(1, steps // 10) == 0:
            noted.append({"step": step, "open shards": tokens.shards.num_open, **memory()})
    rate = steps * batch_size / (time.perf_counter() - began)
    return {"images/s": round(rate), "margin": round(rate / NEEDED, 2), "memory": noted}


@contextlib.contextmanager
def stand_in() -> Iterator[str]:
    """Run moto's S3 server in another process and yield the URL of a bucket."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        os.environ.update(keys, AWS_ENDPOINT_URL=server.stdout.readline().strip())
        import s3fs

        s3fs.S3FileSystem().mkdir("tokens")
        yield "s3://tokens/set"
        server.communicate("")


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--images", type=int, default=1024, help="Of each shard.")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--shuffle", type=int, default=65536, help="Images of a window.")
    parser.add_argument("--url", help="A folder in an object store instead of moto's server.")
    parser.add_argument("--note", default="", help="About the machine, like other load.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = {"batch_size": options.batch_size, "shuffle": options.shuffle}
    rows = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        os.environ["ARPG_HOME"] = f"{scratch}/home"
        os.environ.setdefault("ARPG_CACHE_GB", "0.25")  # less than the set, so that files come and go
        url = options.url or stack.enter_context(stand_in())
        for name, folder in (("local disk", Path(scratch) / "tokens"), ("object store", as_path(url))):
            write_set(folder, options.shards, options.images)
            rows.append({"from": name, **read_epoch(folder, **settings)})
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "memory"}))
            first, last = rows[-1]["memory"][1], rows[-1]["memory"][-1]
            print(f"  memory after a tenth of the epoch {first}, at its end {last}")
    if options.out is not None:
        about = environment(torch.device("cpu")) | {"needed images/s": NEEDED, "note": options.note, **settings}
        write_json(options.out, {"about": about | {"shards": options.shards, "images": options.images}, "rows": rows})


if __name__ == "__main__":
    main()
