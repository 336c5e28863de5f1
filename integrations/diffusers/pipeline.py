"""The file that `DiffusionPipeline.from_pretrained(folder, custom_pipeline="integrations/diffusers")` reads.

It can also be put into a hub repository beside the model. The code is in the package: `pip install arpg[diffusers]`.
"""

from arpg.diffusers_pipeline import ARPGPipeline

__all__ = ["ARPGPipeline"]
