"""Encoders: MiniLM and a tiny T5 behind one interface; cutting, odd prompts, and states that are kept."""

import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from arpg import InputError
from arpg.config import TextConfig
from arpg.text_encoder import MINILM_PACKAGE, PromptCache, load_minilm, load_t5, open_encoder, readable
from support.small import FakeEncoder

transformers = pytest.importorskip("transformers")
WORDS = ["a", "red", "green", "apple", "banana", "on", "left", "of", "background"]


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    """A T5 with random weights and a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("t5")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=len(vocabulary),
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    torch.manual_seed(0)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def t5(t5_folder):
    return load_t5(str(t5_folder), max_tokens=6)


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip(MINILM_PACKAGE)
    return open_encoder(TextConfig("minilm", 384, 16))


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it was not installed
    with pytest.raises(InputError, match=r"prompts need the extra: pip install 'arpg\[text\]'"):
        load_minilm(max_tokens=16)


def test_t5_states_are_those_of_the_padded_and_masked_network(t5):
    """Left padding to `max_tokens` with a mask gives the real tokens the same states."""
    prompts = ["a red apple", "banana", "green apple on a red background"]
    states = t5.states(prompts, batch_size=8)
    assert [len(s) for s in states] == [4, 2, 6]
    for prompt, ours in zip(prompts, states, strict=True):
        ids = t5.tokenizer(prompt, truncation=True, max_length=6)["input_ids"]
        padded = torch.tensor([[0] * (6 - len(ids)) + ids])
        mask = (torch.arange(6) >= 6 - len(ids)).long()[None]
        with torch.no_grad():
            whole = t5.network(input_ids=padded, attention_mask=mask).last_hidden_state[0]
        assert torch.allclose(ours, whole[6 - len(ids) :], atol=1e-5)


def test_states_do_not_depend_on_the_batch(t5, minilm):
    prompts = ["a red apple", "a green apple", "banana", "", "apple on the left of a banana"]
    for encoder in (t5, minilm):
        alone = [encoder.states([prompt])[0] for prompt in prompts]
        for together, single in zip(encoder.states(prompts, batch_size=3), alone, strict=True):
            assert torch.allclose(together, single, atol=1e-5)
            assert together.dtype == torch.float32


def test_long_prompts_are_cut_with_a_warning(t5, minilm, caplog):
    for encoder, most in ((t5, 6), (minilm, 16)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "arpg"):
            states = encoder.states(["a red apple on " * 20])[0]
        assert len(states) == most
        assert f"only the first {most} count" in caplog.text
        assert torch.allclose(states, encoder.states(["a red apple on " * 30])[0])


def test_minilm_knows_what_sentences_mean(minilm):
    """Mean states of a paraphrase are nearer than those of something else."""
    a, b, c = (s.mean(0) for s in minilm.states(["a red apple", "an apple that is red", "the stock market fell"]))
    near, far = (torch.cosine_similarity(a, x, dim=0) for x in (b, c))
    assert near > 0.8 > 0.4 > far
    assert minilm.states(["strawberry"])[0].shape == (3, 384)


@pytest.mark.parametrize(
    "prompt", ["", "   \n", "\u200b", "яблоко", "リンゴ", "سيب", "🍓", "👩🏽‍🌾 🍎", "a" * 5000, "\x00\x07"]
)
def test_odd_prompts_have_finite_states(t5, minilm, prompt):
    for encoder, most in ((t5, 6), (minilm, 16)):
        states = encoder.states([prompt])[0]
        assert 1 <= len(states) <= most
        assert bool(states.isfinite().all())


def test_emoji_are_read_by_name(minilm):
    assert readable("two 🍓🍓 and ❤️ 👍🏽") == "two strawberry strawberry and heavy black heart thumbs up sign"
    assert torch.equal(minilm.states(["🍓"])[0], minilm.states(["strawberry"])[0])
    assert readable("  café\tau\u200d lait ") == "café au lait"


def test_unknown_scripts_are_said(t5, caplog):
    with caplog.at_level(logging.WARNING, "arpg"):
        t5.states(["яблоко груша"])
    assert "mostly unknown" in caplog.text
    caplog.clear()
    t5.states(["red apple", ""])
    assert not caplog.text


def test_states_are_kept_in_memory_and_on_disk(t5, tmp_path):
    config, loaded = TextConfig("tiny", 16, 6), []

    def load():
        loaded.append(1)
        return t5

    def prompts(**changes):
        return PromptCache(
            TextConfig(**{"encoder": "tiny", "width": 16, "max_tokens": 6, **changes}), folder=tmp_path, load=load
        )

    first = PromptCache(config, folder=tmp_path, load=load)
    states = first.states("a red apple")
    assert first.states("a red apple") is states
    assert len(loaded) == 1
    again = prompts()
    assert torch.equal(again.states("a red apple"), states)
    assert len(loaded) == 1  # not even the encoder was needed
    again.states("a green apple")
    prompts(max_tokens=5).states("a red apple")
    assert len(loaded) == 3
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:40])
    assert torch.equal(prompts().states("a red apple"), states)
    assert len(loaded) == 4
    for file in tmp_path.iterdir():
        np.save(file, np.zeros((3, 4), np.float32))
    assert torch.equal(prompts().states("a red apple"), states)
    without = PromptCache(config, load=load)
    without.states("banana")
    assert not any("banana" in str(path) for path in tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_costs_the_cache_only(t5, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    prompts = PromptCache(TextConfig("tiny", 16, 6), folder=tmp_path / "file" / "text", load=lambda: t5)
    for prompt in ("a red apple", "a green apple"):
        assert torch.equal(prompts.states(prompt), t5.states([prompt])[0])
    assert caplog.text.count("not kept on disk") == 1


def test_memory_is_bounded(t5, monkeypatch):
    prompts = PromptCache(TextConfig("tiny", 16, 6), load=lambda: t5)
    a = prompts.states("a")
    monkeypatch.setattr("arpg.text_encoder.MAX_CACHE_BYTES", 2 * a.nbytes)
    prompts.states("red")
    assert prompts.states("a") is a  # used again, so it stays
    prompts.states("apple")
    assert prompts.states("a") is a
    assert prompts.states("red") is not None
    assert len(prompts._cached) == 2


def test_threads_share_prompts():
    """A prompt is read once, and one prompt at a time, whoever asks: tokenizers are not made for more."""

    class Careful(FakeEncoder):
        inside = 0

        def states(self, prompts, **options):
            self.inside += 1
            assert self.inside == 1
            time.sleep(0.001)  # the others get their chance
            made = super().states(prompts, **options)
            self.inside -= 1
            return made

    loaded = []
    shared = PromptCache(TextConfig("fake", 12, 7), load=lambda: loaded.append(Careful()) or loaded[-1])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(shared.states, [f"prompt {i % 6}" for i in range(48)]))
    assert len(loaded) == 1
    assert loaded[0].asked == 6
    assert all(found[i] is found[i % 6] for i in range(48))


def test_bad_encoders_are_one_line(t5_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("./nothing/at/all", str(tmp_path / "empty")):
        with pytest.raises(InputError, match=r"could not be loaded .* expected minilm") as error:
            open_encoder(TextConfig(name, 16, 6))
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="has states of 16 numbers; the model takes 2048"):
        open_encoder(TextConfig(str(t5_folder), 2048, 120))
