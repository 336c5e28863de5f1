"""The network: Pass 1 turns known tokens into keys and values, Pass 2 predicts positions from them."""

from arpg.model.arpg import ARPG
from arpg.model.cache import Cache
from arpg.model.condition import Condition, ControlMap, class_condition, control_condition, text_condition
from arpg.model.decoder import TokenDecoder

__all__ = [
    "ARPG",
    "Cache",
    "Condition",
    "ControlMap",
    "TokenDecoder",
    "class_condition",
    "control_condition",
    "text_condition",
]
