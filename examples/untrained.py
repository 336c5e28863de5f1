"""Make a small model folder with random weights: enough to try every command without a trained model.

Usage: python examples/untrained.py FOLDER
"""

import sys
from pathlib import Path

import torch

from arpg import ARPG, ModelConfig, Pipeline, SamplingDefaults, TokenizerConfig, VQTokenizer


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    model = ARPG(
        ModelConfig(
            width=128, num_heads=4, pass1_layers=2, pass2_layers=2, vocab_size=512, num_classes=10, grid=(12, 12)
        )
    )
    model.init_weights(seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.02)  # a fresh head is zero: every code equally likely
    tokenizer = VQTokenizer(TokenizerConfig(channels=32, multipliers=(1, 2, 2), z_channels=64, codebook_size=512))
    sampling = SamplingDefaults(steps=16, guidance_by_steps=((16, 2.0),))
    Pipeline(model.eval(), tokenizer.eval(), sampling=sampling, license="MIT").save_pretrained(folder)


if __name__ == "__main__":
    main()
