"""The model folder of meadow-control; `arpg` finds it by the entry points `arpg.models`."""
