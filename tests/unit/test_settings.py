"""The tables of settings: what they promise to every surface that is made from them."""

import dataclasses

import pytest

from arpg import InputError, SamplingDefaults, SamplingSettings
from arpg.settings import ALIASES, SETTINGS, TASK_SETTINGS, canonical_names


def test_fields_and_defaults_are_those_of_the_table():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingSettings)}
    assert fields == {name: setting.default for name, setting in SETTINGS.items()}
    recommended = {field.name for field in dataclasses.fields(SamplingDefaults)}
    assert recommended - {"guidance_by_steps"} <= set(SETTINGS)


@pytest.mark.parametrize("setting", [*SETTINGS.values(), *TASK_SETTINGS.values()], ids=lambda setting: setting.name)
def test_every_setting_describes_itself(setting):
    assert setting.help.endswith(".")
    assert all(line.endswith(".") for line in setting.choices.values())
    if setting.choices:
        assert setting.default == setting.names[0], "the default stands first"
        with pytest.raises(InputError, match=f"{setting.name} is 'nonsense'; expected one of"):
            setting.check("nonsense")
    elif setting.default is not None:
        setting.check(setting.default)
    if setting.minimum is not None:
        with pytest.raises(InputError, match=f"{setting.name} is "):
            setting.check(setting.minimum - 1)


def test_aliases():
    assert not set(ALIASES) & (set(SETTINGS) | set(TASK_SETTINGS))
    given = {"num_inference_steps": 8, "guidance_scale": 2.0, "num_images_per_prompt": 3, "way": "windows"}
    assert canonical_names(given) == {"steps": 8, "guidance": 2.0, "num_images": 3, "method": "windows"}
    settings = SamplingDefaults().settings(num_inference_steps=8, guidance_scale=2.0)
    assert (settings.steps, settings.guidance) == (8, 2.0)
    with pytest.raises(InputError, match="num_inference_steps is another name of steps"):
        SamplingDefaults().settings(steps=4, num_inference_steps=8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"steps": 8.5}, "steps is 8.5; expected a whole number of 1 or more"),
        ({"steps": "8"}, "steps is '8'; expected a whole number of 1 or more"),
        ({"top_k": 2.5}, "top_k is 2.5; expected a whole number of 1 or more"),
        ({"guidance": "3"}, "guidance is '3'; expected a finite number of 0 or more"),
        ({"top_p": "1"}, "top_p is '1'; expected 0 < top_p <= 1"),
        ({"decode": "greedy", "steps": 8}, "decode is 'greedy'; expected one of steps, exact, speculative"),
    ],
)
def test_a_value_of_another_kind_is_named(given, says):
    with pytest.raises(InputError, match=says):
        SamplingDefaults().settings(**given)
