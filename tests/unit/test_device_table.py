"""The tables of memory and cards: what the page shows is what the command makes, and the formula is that of a model."""

import torch

from arpg.bench.case import Case
from arpg.decode.plan import plan_sample
from arpg.device import GPU_SPECS, gpu_spec
from arpg.settings import SamplingSettings
from benchmarks import device_table
from support.small import SMALL, small_model


def test_the_page_has_the_present_tables(tmp_path, capsys):
    page = tmp_path / "devices.md"
    page.write_text(device_table.PAGE.read_text())
    device_table.main(["--write", "--page", str(page)])
    assert page.read_text() == device_table.PAGE.read_text(), "run `python -m benchmarks.device_table --write`"
    assert "arpg-xxl" in capsys.readouterr().out


def test_every_name_of_a_card_finds_its_own_numbers():
    for name, spec in GPU_SPECS.items():
        assert gpu_spec(f"NVIDIA {name}" if not name.startswith("NVIDIA") else name) == spec
    assert gpu_spec("NVIDIA L40S") != gpu_spec("NVIDIA L40") != gpu_spec("NVIDIA L4")
    assert [name for name, spec in GPU_SPECS.items() if not device_table.has_fp8(spec)] == [
        *(name for name in GPU_SPECS if name.startswith("A")),
        "Tesla T4",
        "MI300X",
    ]


def test_the_bytes_of_a_batch():
    """Weights and cache as allocated; 8-bit weights are those of the linear layers alone."""
    settings = SamplingSettings(steps=4, guidance=3.0)
    alone, three = (device_table.decode_bytes(SMALL, Case("small", b, settings, (4, 4)), torch.float32) for b in (1, 3))
    model, sizes = small_model(), plan_sample((4, 4), [False] * 16, 0, settings).sizes
    cache = model.allocate_cache(2, 1 + 16 - sizes[-1])
    cache_bytes = cache.key_LBTHK.nbytes + cache.value_LBTHK.nbytes
    scratch = 4 * 2 * max(sizes) * (3 * SMALL.width + 3 * SMALL.ffn_width)
    weights = sum(p.nbytes for p in model.parameters())
    assert alone == weights + cache_bytes + scratch
    assert three - alone == 2 * (cache_bytes + scratch)
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    narrow = device_table.decode_bytes(SMALL, Case("small", 1, settings, (4, 4)), torch.float32, weight_size=1)
    assert alone - narrow == 3 * linears
