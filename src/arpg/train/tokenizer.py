"""`arpg train-tokenizer`: train a VQ tokenizer on images.

Shapes: B local batch, HW pixels, hw latent grid, V codes, E codebook channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from PIL import Image
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

from arpg.checkpoint import FolderConfig, load_tokenizer, write_folder
from arpg.data.crops import CropStream, center_crops
from arpg.data.images import open_images
from arpg.errors import require
from arpg.evaluation.reconstruction import reconstruction_report
from arpg.files import State
from arpg.hub import resolve
from arpg.image import sheet, to_images, to_pil
from arpg.kernels.dispatch import can_compile
from arpg.storage import AnyPath
from arpg.tokenizer import VQTokenizer
from arpg.tokenizer.losses import (
    LPIPS,
    PatchDiscriminator,
    balance,
    hinge_discriminator_loss,
    hinge_generator_loss,
    restart_dead_codes,
    vector_quantize,
)
from arpg.train.distributed import World, parallelize
from arpg.train.loop import EMA, Training, learning_rate, make_adamw, set_learning_rate, train
from arpg.train.recipe import SHARDED, TokenizerRecipe


class Reconstruction(NamedTuple):
    """Reconstructed images, their ids and latents, and the losses of the codebook."""

    image_B3HW: Tensor
    ids_BN: Tensor
    z_BEhw: Tensor
    codebook: Tensor
    commitment: Tensor


class TokenizerObjective(nn.Module):
    """The tokenizer as it is trained, from images to reconstructions and the losses of the codebook."""

    def __init__(self, tokenizer: VQTokenizer, *, decoder_only: bool = False) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.decoder_only = decoder_only
        if decoder_only:  # what makes the tokens stays as it is
            for part in (tokenizer.encoder, tokenizer.quant_conv, tokenizer.quantize):
                part.requires_grad_(False)

    def forward(self, image_B3HW: Tensor) -> Reconstruction:
        t = self.tokenizer
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.decoder_only):
            z = t.quant_conv(t.encoder(image_B3HW))
        quantized = vector_quantize(z, t.quantize.codes())
        return Reconstruction(
            image_B3HW=t.decode_codes(quantized.codes_BEhw),
            ids_BN=quantized.ids_BN,
            z_BEhw=z.detach(),
            codebook=quantized.codebook_loss,
            commitment=quantized.commitment_loss,
        )


class ReconstructionLoss(nn.Module):
    """The mean squared error and LPIPS of reconstructions, each averaged over the batch."""

    def __init__(self, lpips: LPIPS) -> None:
        super().__init__()
        self.lpips = lpips

    def forward(self, out_B3HW: Tensor, image_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        return F.mse_loss(out_B3HW.float(), image_B3HW.float()), self.lpips(out_B3HW, image_B3HW).mean()


class TokenizerTraining(Training):
    """One run of a tokenizer recipe."""

    recipe: TokenizerRecipe

    def __init__(self, recipe: TokenizerRecipe, folder: AnyPath, world: World) -> None:
        require(recipe.run.patience == 0, "a tokenizer has no single validation loss; set run.patience to 0")
        require(
            recipe.run.accumulate == 1 and recipe.run.parallel not in SHARDED,
            "a tokenizer is trained with run.accumulate = 1 and run.parallel = none or ddp: it is small",
        )
        super().__init__(folder, world)
        self.recipe = recipe
        torch.manual_seed(recipe.seed)
        if recipe.init_from is not None:
            tokenizer = load_tokenizer(resolve(recipe.init_from), dtype=torch.float32)
            require(
                tokenizer.config == recipe.tokenizer,
                f"init_from {recipe.init_from} is {tokenizer.config}; the recipe says {recipe.tokenizer}",
            )
        else:
            tokenizer = VQTokenizer(recipe.tokenizer)
            nn.init.normal_(tokenizer.quantize.embedding.weight)  # uniform on the sphere, once normalised
        fast = world.device.type == "cuda"
        layout = torch.channels_last if fast else torch.contiguous_format
        self.tokenizer = tokenizer.to(world.device, memory_format=layout).train()  # type: ignore[call-overload]
        self.lpips = LPIPS.load(Path(recipe.loss.lpips_weights)).to(world.device, memory_format=layout)  # type: ignore[call-overload]
        self.objective = TokenizerObjective(self.tokenizer, decoder_only=recipe.decoder_only)
        self.reconstruction_loss = ReconstructionLoss(self.lpips)
        self.discriminator = PatchDiscriminator().to(world.device, memory_format=layout)  # type: ignore[call-overload]
        if recipe.run.compile and can_compile(self.tokenizer.quantize.embedding.weight):
            self.objective.compile()
            self.reconstruction_loss.compile()
        self.parallel = parallelize(self.objective, recipe.run.parallel, world, [])
        self.parallel_discriminator = parallelize(self.discriminator, recipe.run.parallel, world, [])
        self.optimizer = make_adamw(self.objective, recipe.optim)
        self.discriminator_optimizer = torch.optim.AdamW(
            self.discriminator.parameters(), lr=recipe.loss.discriminator_lr, betas=(0.5, 0.95), fused=True
        )
        self.ema = EMA(self.objective, recipe.optim.ema)
        self.counts_V = torch.zeros(recipe.tokenizer.codebook_size, device=world.device)
        self.stream = CropStream(
            [(open_images(source.path), source.weight) for source in recipe.data.sources],
            recipe.data.size,
            seed=recipe.seed,
            batch_size=recipe.run.batch_size,
            rank=world.rank,
            world_size=world.size,
            margin=recipe.data.margin,
            scale=recipe.data.scale,
        )
        self.validation = {
            _source_name(source.path): center_crops(
                open_images(source.path), recipe.data.size, limit=recipe.data.validation_images
            )
            for source in recipe.data.validation
        }

    def step(self, step: int) -> dict[str, Tensor]:
        """Update the tokenizer, then the discriminator once it is on, then restart dead codes.

        The losses of the image stop at its pixels, where their gradients are balanced; one backward pass takes the sum
        through the decoder.
        """
        loss, run = self.recipe.loss, self.recipe.run
        rate = learning_rate(self.recipe.optim, step, run.steps)
        set_learning_rate(self.optimizer, rate)
        set_learning_rate(self.discriminator_optimizer, loss.discriminator_lr * rate / self.recipe.optim.lr)
        adversarial = loss.adversarial > 0 and step >= loss.adversarial_start * run.steps
        image = self.stream.images(step, self.world.device)
        with self.autocast():
            out: Reconstruction = self.parallel(image)
            pixels = out.image_B3HW.detach().requires_grad_()
            mse, lpips = self.reconstruction_loss(pixels, image)
            generator = hinge_generator_loss(self.discriminator(pixels)) if adversarial else None
        total = loss.mse * mse + loss.lpips * lpips
        (gradient,) = torch.autograd.grad(total, pixels)
        if generator is not None:
            (push,) = torch.autograd.grad(generator, pixels)
            weight = loss.adversarial * (balance(gradient, push) if loss.adaptive else torch.ones_like(generator))
            total, gradient = total + weight * generator, gradient + weight * push
        codes = out.codebook + loss.commitment * out.commitment
        ends, gradients = [out.image_B3HW], [gradient]
        if not self.recipe.decoder_only:
            ends, gradients = [*ends, codes], [*gradients, torch.ones_like(codes)]
        torch.autograd.backward(ends, gradients)
        if self.recipe.optim.clip > 0:
            nn.utils.clip_grad_norm_(self.objective.parameters(), self.recipe.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        losses = {"loss": total + codes, "mse": mse, "lpips": lpips, "codebook": out.codebook}
        if generator is not None:
            losses |= {
                "generator": generator,
                "adversarial weight": weight,
                "discriminator": self._discriminator_step(image, out.image_B3HW.detach()),
            }
        self._restart_codes(step, out)
        self.ema.update(step)
        return {name: value.detach() for name, value in losses.items()}

    def _discriminator_step(self, real: Tensor, fake: Tensor) -> Tensor:
        with self.autocast():
            logits = self.parallel_discriminator(torch.cat((real, fake.to(real.dtype))))
            loss = hinge_discriminator_loss(*logits.chunk(2))
        loss.backward()  # type: ignore[no-untyped-call]
        self.discriminator_optimizer.step()
        self.discriminator_optimizer.zero_grad(set_to_none=True)
        return loss

    def _restart_codes(self, step: int, out: Reconstruction) -> None:
        """Replace codes that were not used for `restart_every` steps by encoder outputs."""
        every = self.recipe.loss.restart_every
        if every == 0:
            return
        counts_V = torch.bincount(out.ids_BN.flatten(), minlength=len(self.counts_V))
        if self.world.size > 1:  # in every step: a snapshot holds the counts of one process
            torch.distributed.all_reduce(counts_V)
        self.counts_V += counts_V
        # Not in the last quarter: a code that restarts then does not converge any more.
        if (step + 1) % every == 0:
            if step < 0.75 * self.recipe.run.steps:
                candidates = out.z_BEhw.float().transpose(0, 1).flatten(1).T.contiguous()
                if self.world.size > 1:
                    torch.distributed.broadcast(candidates, 0)
                generator = torch.Generator().manual_seed(self.recipe.seed + step)
                weight = self.tokenizer.quantize.embedding.weight
                restart_dead_codes(weight, self.counts_V, candidates, generator=generator)
            self.counts_V.zero_()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return PSNR, LPIPS and codebook usage of the averaged weights, for each validation source."""
        metrics: dict[str, float] = {}
        with self._averaged() as tokenizer:
            for name, pixels in self.validation.items():
                report = reconstruction_report(tokenizer, pixels, self.lpips, batch_size=128)
                metrics |= {f"{name} {key}": float(report[key]) for key in ("psnr", "lpips", "usage")}
        return metrics

    @torch.no_grad()
    def sheet(self, num_images: int = 8) -> Image.Image | None:
        """Return a sheet of validation images above their reconstructions."""
        if not self.validation:
            return None
        pixels = np.concatenate([p[:: max(1, len(p) // num_images)][:num_images] for p in self.validation.values()])
        with self._averaged() as tokenizer:
            images = to_images(pixels, self.world.device)
            out = tokenizer.decode(tokenizer.encode(images), tokenizer.grid(*images.shape[2:]))
        rows = []
        shown = [Image.fromarray(p) for p in pixels]
        for i in range(0, len(shown), num_images):
            rows += shown[i : i + num_images] + to_pil(out[i : i + num_images])
        return sheet(rows, columns=num_images)

    @contextmanager
    def _averaged(self) -> Iterator[VQTokenizer]:
        """Give the tokenizer averaged weights and eval mode inside a `with`."""
        with self.ema.swapped_in():
            try:
                yield self.tokenizer.eval()
            finally:
                self.tokenizer.train()

    def state(self) -> dict[str, Any]:
        """Return the state that a snapshot holds: also that of the discriminator, and the counts of used codes."""
        return super().state() | {
            "discriminator": get_model_state_dict(self.discriminator),
            "discriminator_optimizer": get_optimizer_state_dict(self.discriminator, self.discriminator_optimizer),
            "counts": self.counts_V,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        super().load_state(state)
        set_model_state_dict(self.discriminator, state["discriminator"])
        set_optimizer_state_dict(self.discriminator, self.discriminator_optimizer, state["discriminator_optimizer"])

    def export(self) -> AnyPath:
        """Write `folder/model`: the averaged weights as a model folder that holds the tokenizer alone."""
        target = self.folder / "model"
        if self.world.main:
            config = FolderConfig(tokenizer=self.recipe.tokenizer, license=self.recipe.license)
            write_folder(target, config, tokenizer=self.averaged_weights())
        return target

    def averaged_weights(self) -> State:
        """Return the averaged weights on the CPU."""
        with self._averaged() as tokenizer:
            return {key: tensor.detach().cpu().clone() for key, tensor in tokenizer.state_dict().items()}

    def describe_batch(self, step: int) -> str:
        """Name the samples of a step's batch."""
        first = step * self.recipe.run.batch_size
        return f"samples {first} to {first + self.recipe.run.batch_size - 1} of seed {self.recipe.seed}"


def _source_name(path: str) -> str:
    """Name a validation source in the logs by the last folder that is no split."""
    parts = [part for part in Path(path).parts if part not in ("train", "test", "val", "validation")]
    return parts[-1].removesuffix(".zip")


def train_tokenizer(recipe: TokenizerRecipe, folder: AnyPath, *, resume: bool = False, device: str = "auto") -> AnyPath:
    """Run a recipe to its end; return the folder of the finished tokenizer."""
    return train(lambda world: TokenizerTraining(recipe, folder, world), resume=resume, device=device)
