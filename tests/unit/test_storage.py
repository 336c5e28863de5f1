"""Storage: the same files through local paths, memory and an S3 server that fails in the middle."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import storage
from arpg.errors import InputError
from arpg.files import (
    hash_file,
    read_array,
    read_json,
    write_array,
    write_json,
    write_tensors,
    write_together,
    write_whole,
)
from arpg.image import save
from arpg.storage import Lease, RemotePath, as_path, fetch, list_files


def test_a_place_becomes_a_path(tmp_path):
    assert as_path("a/b") == as_path(tmp_path / "x").parent.__class__("a/b")
    assert as_path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    path = as_path("s3://bucket/a/b.tar.npz/")
    assert isinstance(path, RemotePath)
    assert (str(path), path.name, path.suffix, path.stem) == ("s3://bucket/a/b.tar.npz", "b.tar.npz", ".npz", "b.tar")
    assert [str(p) for p in path.parents] == ["s3://bucket/a", "s3://bucket"]
    assert str((path / "c").relative_to(path.parent)) == "b.tar.npz/c"
    with pytest.raises(InputError, match="names no bucket"):
        as_path("s3://")


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request, tmp_path, monkeypatch):
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    if request.param == "local":
        return tmp_path / "files"
    if request.param == "memory":
        return as_path(f"memory://{tmp_path.name}/files")
    return as_path(f"{request.getfixturevalue('bucket')}/files")


def test_files_are_the_same_in_every_store(folder):
    array = np.arange(1000).reshape(10, 100)
    assert not folder.exists()
    write_array(folder / "a" / "x.npy", array)
    write_json(folder / "y.json", {"z": 1})
    np.testing.assert_array_equal(read_array(folder / "a" / "x.npy", advice=""), array)
    assert read_json(folder / "y.json") == {"z": 1}
    assert sorted(list_files(folder)) == ["a/x.npy", "y.json"]
    assert sorted(p.name for p in folder.iterdir()) == ["a", "y.json"]
    assert [p.name for p in folder.glob("*.json")] == ["y.json"]
    assert [p.name for p in folder.glob("*/*.npy")] == ["x.npy"]
    assert folder.is_dir()
    assert (folder / "y.json").is_file()
    assert not (folder / "y.json").is_dir()
    assert len(hash_file(folder / "a" / "x.npy")) == 64
    write_json(folder / "y.json", {"z": 2})  # and a file that is written again is not read from the cache
    assert read_json(folder / "y.json") == {"z": 2}
    write_array(folder / "a" / "x.npy", array + 1)
    np.testing.assert_array_equal(read_array(folder / "a" / "x.npy", advice=""), array + 1)
    (folder / "y.json").unlink()
    (folder / "y.json").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (folder / "y.json").unlink()


def test_files_are_written_together_or_not_at_all(folder):
    def fail(path):
        path.write_bytes(b"half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_together({folder / "a": lambda path: path.write_bytes(b"x"), folder / "b": fail})
    assert list_files(folder) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_new_files_have_the_rights_that_the_umask_gives(tmp_path, monkeypatch):
    """Also weights and images; and the umask, which all threads share, is not changed to learn it."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
            write_json(tmp_path / "a.json", 1)
            write_array(tmp_path / "a.npy", np.zeros(1))
            write_whole(tmp_path / "a.safetensors", lambda path: write_tensors({"a": torch.zeros(1)}, path))
            save(Image.new("RGB", (8, 8)), tmp_path / "a.png")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("a.json", "a.npy", "a.safetensors", "a.png"), oct(0o640)
    )


def test_faults_of_the_store_are_survived(bucket, faults):
    """Errors, cut uploads and cut downloads: the bytes arrive, and under its name a file is never half there."""
    array = np.arange(100_000)
    path = as_path(f"{bucket}/faults/x.npy")
    seen, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            try:
                seen.append(path.info()["size"])
            except FileNotFoundError:
                seen.append(None)

    watcher = threading.Thread(target=watch)
    watcher.start()
    faults.errors, faults.truncated_uploads = 3, 2
    write_array(path, array)
    stop.set()
    watcher.join()
    assert faults.truncated_uploads == 0
    assert set(seen) <= {None, array.nbytes + 128}
    faults.errors, faults.truncated_downloads = 2, 2
    np.testing.assert_array_equal(read_array(path, advice=""), array)
    assert faults.truncated_downloads == 0
    assert list_files(path.parent) == ["x.npy"]  # no temporary file stays


def test_slow_answers_are_waited_for(bucket, faults):
    path = as_path(f"{bucket}/slow/x.json")
    faults.slow = 0.05
    write_json(path, [1, 2])
    assert read_json(path) == [1, 2]


def test_an_upload_that_never_succeeds_leaves_what_was_there(bucket, faults):
    path = as_path(f"{bucket}/kept/x.json")
    write_json(path, "old")
    faults.truncated_uploads = 10**6
    with pytest.raises(InputError, match=r"kept/.* cannot be reached .*bytes arrived"):
        write_json(path, "new" * 100)
    faults.truncated_uploads = 0
    assert read_json(path) == "old"
    assert list_files(path.parent) == ["x.json"]


def test_the_cache_keeps_its_limit(bucket, faults, monkeypatch):
    """Files are downloaded once while they fit; beyond the limit the one that was not used longest goes."""
    paths = [as_path(f"{bucket}/cached/{i}.npy") for i in range(4)]
    for i, path in enumerate(paths):
        write_array(path, np.full(1000, i))
    monkeypatch.setenv("ARPG_CACHE_GB", str(3 * 8200 / 1e9))
    local = [fetch(path) for path in paths[:3]]
    for i, path in enumerate(local):
        os.utime(path, ns=(i, i))
    assert fetch(paths[0]) == local[0]  # used again: 1 is the oldest now
    fetch(paths[3])
    assert [path.exists() for path in local] == [True, False, True]
    faults.requests.clear()
    fetch(paths[0])
    assert "GET" not in [method for method, _ in faults.requests]
    np.testing.assert_array_equal(np.load(fetch(paths[1])), np.full(1000, 1))
    left, running = (local[0].with_name(f".download.{name}") for name in "ab")  # of a killed process, and of another
    for path in (left, running):
        path.write_bytes(bytes(8128))
    os.utime(left, ns=(0, 0))
    fetch(paths[2])
    assert not left.exists()
    assert running.exists()
    monkeypatch.setenv("ARPG_CACHE_GB", "32 GB")
    write_array(paths[0] / "new", np.zeros(1))
    with pytest.raises(InputError, match=r"ARPG_CACHE_GB is '32 GB'; expected a number of gigabytes, such as 32"):
        fetch(paths[0] / "new")


def test_errors_name_the_place_and_the_remedy(bucket, monkeypatch, fresh_filesystems):
    with pytest.raises(InputError, match=r"zz:// is no known protocol; expected s3"):
        as_path("zz://bucket/x").exists()
    with pytest.raises(InputError, match=r"nobucket/x\.json cannot be written: .*make the bucket first"):
        write_json(as_path("s3://nobucket/x.json"), 1)
    assert not as_path("s3://nobucket/x").exists()
    fresh_filesystems()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(InputError, match=r"s3://bucket/x cannot be reached \(.*check the network"):
            as_path("s3://bucket/x").exists()
    fresh_filesystems()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(InputError, match=r"s3://bucket/x: there are no credentials .*AWS_ACCESS_KEY_ID"):
        as_path("s3://bucket/x").exists()


def test_a_protocol_without_its_package_names_the_extra(monkeypatch, fresh_filesystems):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InputError, match=r"gs:// needs another package .*arpg\[cloud\]"):
        as_path("gs://bucket/x").exists()


def test_local_paths_do_not_import_fsspec(tmp_path):
    code = "import sys; from arpg.storage import *; fetch(as_path('x')); assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_two_jobs_cannot_write_one_folder(folder):
    with Lease(folder) as first:
        with pytest.raises(InputError, match=f"is being written by process {os.getpid()} on .*choose another folder"):
            Lease(folder).__enter__()
        first.check()
    with Lease(folder):
        pass
    assert list_files(folder) == []


def test_the_lease_of_a_dead_job_is_free(folder, monkeypatch):
    def leave(**changes):
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            pass
        here = {"owner": "x", "host": socket.gethostname(), "pid": ended.pid, "time": 2e10}
        write_json(folder / storage.LEASE, here | changes)

    leave()
    with Lease(folder):
        pass
    leave(host="elsewhere")  # cannot be asked, and has just renewed it
    with pytest.raises(InputError, match="on elsewhere"):
        Lease(folder).__enter__()
    leave(host="elsewhere", time=0)
    with Lease(folder):
        pass
    leave(host="elsewhere", owner="torchrun job7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    with Lease(folder):
        pass


def test_no_process_is_probed_on_windows(tmp_path, monkeypatch):
    """Signal 0 is Ctrl-C there. The lease of a dead job is free once it is old."""
    killed = []
    monkeypatch.setattr(storage.sys, "platform", "win32")
    monkeypatch.setattr(storage.os, "kill", lambda *signal: killed.append(signal))
    lease = {"owner": "x", "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    write_json(tmp_path / storage.LEASE, lease)
    with pytest.raises(InputError, match="is being written by process"):
        Lease(tmp_path).__enter__()
    write_json(tmp_path / storage.LEASE, lease | {"time": time.time() - 2 * storage.STALE_SECONDS})
    with Lease(tmp_path):
        assert not killed


def test_a_lease_is_renewed_and_its_loss_is_noticed(folder, monkeypatch):
    monkeypatch.setattr(storage, "HEARTBEAT_SECONDS", 0.01)
    with Lease(folder) as lease:
        opened = lease.path.open() if not isinstance(lease.path, RemotePath) else None
        before = json.loads(lease.path.read_text())["time"]
        while json.loads(lease.path.read_text())["time"] == before:
            pass
        if opened is not None:  # a renewal replaces the file: a reader never sees a part of it
            with opened:
                assert json.load(opened)["time"] == before
        other = Lease(folder)
        for _ in range(100):  # a renewal that is under way overwrites the new owner
            other.path.unlink(missing_ok=True)
            other._create()
            lease._thread.join(0.1)
            if not lease._thread.is_alive():
                break
        with pytest.raises(InputError, match="taken over by another job"):
            lease.check()
    assert other._read()["owner"] == other.owner  # the loser leaves it


def test_arrays_are_read_by_several_threads(tmp_path):
    """Without the lock of `read_array`, Python 3.11 raises SystemError here, in about one of a thousand reads."""
    path = tmp_path / "x.npy"
    write_array(path, np.arange(5))

    def give_way(*_):  # garbage is collected within the parsing of a header; another thread runs then
        time.sleep(1e-5)

    threshold = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(7, 1000, 1000)
    try:
        with ThreadPoolExecutor(8) as pool:
            sums = list(pool.map(lambda _: int(read_array(path, advice="").sum()), range(4000)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(give_way)
    assert sums == [10] * 4000
