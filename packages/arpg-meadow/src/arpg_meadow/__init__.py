"""The model folders of meadow-256 and meadow-control; `arpg` finds them by the entry points `arpg.models`."""
