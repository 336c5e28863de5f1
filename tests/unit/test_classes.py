"""Class names: look-up, suggestions, the built-in ImageNet list."""

import pytest

from arpg import InputError
from arpg.classes import ClassNames, imagenet_classes, parse_classes

NAMES = imagenet_classes()


def test_imagenet():
    assert len(NAMES) == 1000
    for class_id, name in ((0, "tench"), (207, "golden retriever"), (388, "giant panda"), (980, "volcano")):
        assert NAMES.name(class_id) == name
    assert NAMES.find("golden retriever") == 207
    assert NAMES.find("Golden_Retriever") == 207
    assert NAMES.find("Tinca tinca") == 0
    assert NAMES.find("toilet paper") == 999
    assert NAMES.find("207") == NAMES.find(207) == 207


def test_every_class_can_be_named_or_says_why_not():
    for class_id, line in enumerate(NAMES.lines):
        if NAMES.lines.count(line) == 1:
            assert NAMES.find(line) == class_id
        else:
            with pytest.raises(InputError, match=rf"ambiguous: .*{class_id} \(crane\)"):
                NAMES.find(line)


def test_spelling_decides_where_case_does():
    assert NAMES.name(NAMES.find("Cardigan")) == "Cardigan"
    assert NAMES.name(NAMES.find("cardigan")) == "cardigan"
    with pytest.raises(InputError, match=r"ambiguous: 134 .*; 517"):
        NAMES.find("crane")


def test_suggestions():
    with pytest.raises(InputError, match=r"'golden retreiver' is unknown; did you mean 'golden retriever' \(207\)"):
        NAMES.find("golden retreiver")
    with pytest.raises(InputError, match=r"did you mean .*retriever"):
        NAMES.find("retriever")
    with pytest.raises(InputError, match="expected one of the 1000 class names"):
        NAMES.find("xqzw")
    for bad in ("1000", "-1", 1000, "--5", "²"):
        with pytest.raises(InputError, match="id from 0 to 999"):
            NAMES.find(bad)


def test_bad_lists():
    with pytest.raises(InputError, match="names 2 classes; the model has 3"):
        parse_classes("a\nb\n", where="x", num_classes=3)
    with pytest.raises(InputError, match="class 0 is named"):
        ClassNames(("a, ,b",))
