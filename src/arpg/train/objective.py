"""The training loss of a model and its gradients: a chunked cross-entropy, and a CUDA graph that replays both passes.

Shapes: B local batch, N grid tokens, M tokens, D width, V vocabulary, T tokens of a caption, E width of the text
states, H W pixels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from arpg.data.dataset import Batch
from arpg.kernels.ops import compiled, to_autocast
from arpg.model import ARPG, Condition, class_condition
from arpg.model.condition import training_condition, training_control

CHUNK = 16384  # tokens whose logits exist at the same time
GOLDEN = (math.sqrt(5) - 1) / 2  # steps of this much around a circle never come close to each other
WARMUP = 3  # calls before the capture, which compile and autotune


class Objective(nn.Module):
    """The network with its loss: one module, so that distribution wraps all that touches a parameter."""

    def __init__(self, model: ARPG, grid: tuple[int, int]) -> None:
        super().__init__()
        self.model = model
        self.grid = grid

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of `batch`, conditioned on its classes or captions and on its condition maps."""
        ids_BN, order_BN, condition = batch.ids_BN, batch.order_BN, batch_condition(self.model, batch)
        x_BND = self.model.hidden(ids_BN, order_BN, condition, grid=self.grid, dropout_key_B=batch.dropout_key_B)
        targets = ids_BN.gather(1, order_BN)
        return linear_cross_entropy(x_BND.flatten(0, 1), self.model.head.weight, targets.flatten())


class GuidanceDistillation(Objective):
    """A model that takes the guidance scale as an input learns the guided probabilities of a teacher.

    The loss is the divergence KL(teacher || model) of every token; its scale is uniform in `scales`, a function of the
    sample's key and the token's place in the order.
    """

    def __init__(self, model: ARPG, grid: tuple[int, int], teacher: ARPG, scales: tuple[float, float]) -> None:
        super().__init__(model, grid)
        self._teacher = (teacher.requires_grad_(False).eval(),)  # not a part: neither trained nor saved
        self.scales = scales

    def scale(self, batch: Batch) -> Tensor:
        """Return the guidance scale of each token of the order, `[B, N]`."""
        low, high = self.scales
        first_B1 = (batch.dropout_key_B.long() & 0xFFFFFF)[:, None].double() / 2**24
        place_N = torch.arange(batch.ids_BN.shape[1], device=first_B1.device).double()
        share_BN = (first_B1 + place_N * GOLDEN) % 1.0
        return (low + (high - low) * share_BN).float()

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean divergence of `batch`."""
        (teacher,), model, scale_BN = self._teacher, self.model, self.scale(batch)
        ids_BN, order_BN = batch.ids_BN, batch.order_BN
        with torch.no_grad():
            sides = [
                teacher.hidden(ids_BN, order_BN, batch_condition(teacher, each), grid=self.grid)
                for each in (batch, drop_condition(batch, teacher.config.num_classes))
            ]
        x_BND = model.hidden(
            ids_BN,
            order_BN,
            batch_condition(model, batch),
            grid=self.grid,
            dropout_key_B=batch.dropout_key_B,
            scale_BN=scale_BN,
        )
        return linear_divergence(
            x_BND.flatten(0, 1),
            model.head.weight,
            [side.flatten(0, 1) for side in sides],
            teacher.head.weight,
            scale_BN.flatten(),
        )


def batch_condition(model: ARPG, batch: Batch) -> Condition:
    """Return the condition of a batch: its classes or captions, and its condition maps."""
    if batch.states_BTE is None or batch.length_B is None:
        condition = class_condition(model, batch.labels_B)
    else:
        condition = training_condition(model, batch.states_BTE, batch.length_B)
    if batch.pixels_BHW is not None and batch.kind_B is not None and batch.dropped_B is not None:
        condition = training_control(model, condition, batch.pixels_BHW, batch.kind_B, batch.dropped_B)
    return condition


def drop_condition(batch: Batch, num_classes: int) -> Batch:
    """Return the batch without its classes, captions and condition maps."""
    return dataclasses.replace(
        batch,
        labels_B=torch.full_like(batch.labels_B, num_classes),
        length_B=None if batch.length_B is None else torch.zeros_like(batch.length_B),
        dropped_B=None if batch.dropped_B is None else torch.ones_like(batch.dropped_B),
    )


def linear_cross_entropy(x_MD: Tensor, weight_VD: Tensor, target_M: Tensor, *, chunk: int = CHUNK) -> Tensor:
    """Compute and differentiate mean(cross_entropy(x @ weight.T, target)) chunk by chunk.

    The gradient of the logits is softmax - onehot, so each chunk's part of both gradients is computed while its logits
    exist; backward only scales them.
    """

    def loss_and_grad(part: slice, logits_MV: Tensor) -> tuple[Tensor, Tensor]:
        return compiled(_softmax_grad, logits_MV)(logits_MV, target_M[part], len(target_M))

    return _linear_loss(x_MD, weight_VD, loss_and_grad, chunk)


def linear_divergence(
    x_MD: Tensor,
    weight_VD: Tensor,
    teacher: Sequence[Tensor],
    teacher_weight_VD: Tensor,
    scale_M: Tensor,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """Compute and differentiate the mean KL(teacher || softmax(x @ weight.T)) chunk by chunk.

    `teacher`: its conditional and unconditional outputs `[M, D]`, whose logits are guided with `scale_M`.
    """
    cond_MD, null_MD, teacher_weight_VD = map(to_autocast, (*teacher, teacher_weight_VD))

    def loss_and_grad(part: slice, logits_MV: Tensor) -> tuple[Tensor, Tensor]:
        sides = (cond_MD[part] @ teacher_weight_VD.T, null_MD[part] @ teacher_weight_VD.T)
        return compiled(_divergence_grad, logits_MV)(logits_MV, *sides, scale_M[part], len(scale_M))

    return _linear_loss(x_MD, weight_VD, loss_and_grad, chunk)


# From a chunk and its logits [M, V] to its part of the mean loss and the gradient of the logits.
LossAndGrad = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


def _linear_loss(x_MD: Tensor, weight_VD: Tensor, loss_and_grad: LossAndGrad, chunk: int) -> Tensor:
    x_MD, weight_VD = to_autocast(x_MD), to_autocast(weight_VD)
    loss: Tensor = _LinearLoss.apply(x_MD, weight_VD, loss_and_grad, chunk)  # type: ignore[no-untyped-call]
    return loss


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, loss_and_grad: LossAndGrad, chunk: int) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]  # an adapter leaves the weight as it is
        grad_x = torch.empty_like(x_MD) if needs_x else None
        grad_weight = torch.zeros(weight_VD.shape, dtype=torch.float32, device=x_MD.device) if needs_weight else None
        total = torch.zeros((), dtype=torch.float32, device=x_MD.device)
        for start in range(0, len(x_MD), chunk):
            part = slice(start, start + chunk)
            loss, grad_logits = loss_and_grad(part, x_MD[part] @ weight_VD.T)
            total += loss
            if grad_x is not None:
                grad_x[part] = grad_logits @ weight_VD
            if grad_weight is not None:
                grad_weight += grad_logits.T @ x_MD[part]
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scaled = compiled(_scaled, grads[0])
        to_x = None if grad_x is None else scaled(grad_x, grads[0], grad_x.dtype)
        to_weight = None if grad_weight is None else scaled(grad_weight, grads[0], ctx.weight_dtype)
        return to_x, to_weight, None, None


def _softmax_grad(logits_MV: Tensor, target_M: Tensor, total: int) -> tuple[Tensor, Tensor]:
    logits = logits_MV.float()
    log_sum = torch.logsumexp(logits, -1, keepdim=True)
    at_target = logits.gather(-1, target_M[:, None])
    loss = (log_sum - at_target).sum() / total
    codes = torch.arange(logits.shape[-1], device=logits.device)
    grad = torch.exp(logits - log_sum) - (codes == target_M[:, None]).float()
    return loss, (grad / total).to(logits_MV.dtype)


def _divergence_grad(
    logits_MV: Tensor, cond_MV: Tensor, null_MV: Tensor, scale_M: Tensor, total: int
) -> tuple[Tensor, Tensor]:
    null = null_MV.float()
    target = (null + scale_M[:, None] * (cond_MV.float() - null)).log_softmax(-1)
    log_probs = logits_MV.float().log_softmax(-1)
    probs = target.exp()
    loss = (probs * (target - log_probs)).sum() / total
    return loss, ((log_probs.exp() - probs) / total).to(logits_MV.dtype)


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale).to(dtype)


class GraphedGradients:
    """Compute a loss and its gradients by replaying one CUDA graph, which leaves no work for the CPU.

    The gradients replace those of the parameters; they are not added. Clipping, AdamW and the moving average stay
    outside of the graph, because their numbers change from step to step.
    """

    def __init__(self, loss: Callable[[Batch], Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self.loss, self.parameters = loss, list(parameters)
        self._calls = 0
        self._batch: Batch | None = None  # the tensors that the graph reads
        self._replay: Callable[[], Any] = lambda: None
        self._value = torch.empty(0)
        self._gradients: list[Tensor | None] = []
        # Of the capture, which must not meet anything that another stream has begun; none without a GPU.
        self._stream = torch.cuda.Stream() if self.parameters[0].is_cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch) -> Tensor:
        """Return the loss of `batch`, detached. A batch of another shape than the captured one runs without a graph."""
        for parameter in self.parameters:
            parameter.grad = None
        if self._batch is None and self._calls >= WARMUP:
            self._capture(batch)
        self._calls += 1
        if self._batch is None or _shapes(batch) != _shapes(self._batch):
            return self._on_stream(batch)
        for static, given in zip(_tensors(self._batch), _tensors(batch), strict=True):
            static.copy_(given)
        self._replay()
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._value.clone()

    def _capture(self, batch: Batch) -> None:
        values: list[Any] = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        copies: list[Any] = [None if value is None else value.clone() for value in values]
        static = Batch(*copies)
        self._replay, self._value = capture_graph(lambda: self._compute(static), self._stream)
        self._gradients = [parameter.grad for parameter in self.parameters]
        self._batch = static

    def _compute(self, batch: Batch) -> Tensor:
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _on_stream(self, batch: Batch) -> Tensor:
        """Compute on the stream of the capture."""
        if self._stream is None:
            return self._compute(batch)
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            value = self._compute(batch)
        main.wait_stream(self._stream)
        return value


def capture_graph(work: Callable[[], Tensor], stream: torch.cuda.Stream | None) -> tuple[Callable[[], Any], Tensor]:
    """Capture `work` in a CUDA graph; return how to replay it and where its value will be. Nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    # Other threads (snapshots, the watchdog of the process group) may call CUDA meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        value = work()
    return graph.replay, value


def _tensors(batch: Batch) -> list[Tensor]:
    values = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return [value for value in values if value is not None]


def _shapes(batch: Batch) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in _tensors(batch)]
