"""How `meadow`, the model of photographs, is made and measured; not part of the package."""
