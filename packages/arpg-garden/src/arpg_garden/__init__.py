"""The model folders of garden, garden-text and garden-control; `arpg` finds them by the entry points `arpg.models`."""
