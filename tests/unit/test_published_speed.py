"""The published code beside ours: a stand-in with its interface is called with our settings, and both rows recorded."""

import pytest
import torch

from arpg import InputError
from arpg.bench.record import read_record
from arpg.device import peak_bytes
from benchmarks import published_speed

STAND_IN = """
import torch

CALLS = []


class Network(torch.nn.Module):
    def __init__(self, vocab_size, num_classes):
        super().__init__()
        self.sizes = vocab_size, num_classes
        self.weight = torch.nn.Parameter(torch.zeros(7))

    def generate(self, condition, **options):
        assert not self.training
        CALLS.append((self.sizes, condition.tolist(), self.weight.dtype, options))
        return torch.zeros(len(condition), options["seq_len"], dtype=torch.long)


ARPG_models = {"ARPG-S": Network}
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "published" / "models").mkdir(parents=True)
    (tmp_path / "published" / "models" / "arpg.py").write_text(STAND_IN)
    return tmp_path / "published"


@pytest.mark.skipif(peak_bytes(torch.device("cpu")) == 0, reason="the platform does not say the peak memory")
def test_both_codes_get_the_same_settings(checkout, folder, tmp_path, capsys, monkeypatch):
    networks = []
    plain = published_speed.published_models

    def spied(path):
        found = plain(path)
        networks.append(found["ARPG-S"])
        return found

    monkeypatch.setattr(published_speed, "published_models", spied)
    out = tmp_path / "both.json"
    options = ["--model", f"ARPG-S={folder}", "--batch", "2", "1", "--steps", "3", "--repeats", "2"]
    published_speed.main([str(checkout), *options, "--device", "cpu", "--out", str(out)])
    record = read_record(out)
    assert [(row["settings"]["code"], row["settings"]["batch"]) for row in record["rows"]] == [
        ("here", 2),
        ("published", 2),
        ("here", 1),
        ("published", 1),
    ]
    for here, there in zip(record["rows"][::2], record["rows"][1::2], strict=True):
        assert {**here["settings"], "code": "published"} == there["settings"]
        assert min(there[name] for name in ("images/s", "peak GiB")) > 0
    assert record["rows"][1]["parameters"] == 7
    assert record["about"]["published commit"] is None
    calls = networks[0].generate.__globals__["CALLS"]
    assert len(calls) == 2 * (published_speed.WARMUP + 2)
    expected = {
        "guidance_scale": 4.0,
        "cfg_schedule": "linear",
        "sample_schedule": "arccos",
        "seq_len": 16,
        "num_iter": 3,
    }
    assert calls[0] == ((24, 5), [0, 1], torch.float32, expected)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= 4
    assert "| 2 |" in printed[2]


def test_what_is_missing_is_named(checkout, tmp_path):
    with pytest.raises(InputError, match="expected a checkout of"):
        published_speed.published_models(tmp_path)
    with pytest.raises(InputError, match=r"no model 'arpg-s'; expected one of ARPG-S"):
        published_speed.main([str(checkout), "--model", "arpg-s", "--device", "cpu"])
    (checkout / "models" / "arpg.py").write_text("import not_there_at_all\n")
    with pytest.raises(InputError, match="imports not_there_at_all, which is not installed"):
        published_speed.published_models(checkout)
