"""A naive second implementation, written from the paper: float64, no cache, everything recomputed, one token at a time.

It takes weights in the published names and shares no code with the package.
"""

import cmath
import math

import torch

MASK_OFFSET, CLASS_OFFSET = 0, 1  # behind the vocabulary: [MASK], then the classes, then the null class


def _norm(x, weight):
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


def _turn(vector, place):
    """Rotate one head's vector; `place` is (row, column), or None for the class slot, which vanishes."""
    if place is None:
        return torch.zeros_like(vector)
    half = len(vector) // 2
    turned = []
    for axis in (0, 1):
        part = vector[axis * half : (axis + 1) * half]
        for i in range(half // 2):
            angle = place[axis] / 10000 ** (2 * i / half)
            z = complex(part[2 * i], part[2 * i + 1]) * cmath.exp(1j * angle)
            turned += [z.real, z.imag]
    return torch.tensor(turned, dtype=torch.float64)


def _attend(q, keys, values, heads):
    """One query vector over lists of key and value vectors (already rotated)."""
    size = len(q) // heads
    out = []
    for h in range(heads):
        s = slice(h * size, (h + 1) * size)
        scores = torch.stack([q[s] @ k[s] for k in keys]) / math.sqrt(size)
        weights = torch.softmax(scores, 0)
        out.append(sum(w * v[s] for w, v in zip(weights, values, strict=True)))
    return torch.cat(out)


def _heads_turn(vector, place, heads):
    return torch.cat([_turn(part, place) for part in vector.chunk(heads)])


def _ffn(x, w, name):
    gate = w[f"{name}.ffn.w1.weight"] @ x
    return w[f"{name}.ffn.w2.weight"] @ (gate * torch.sigmoid(gate) * (w[f"{name}.ffn.w3.weight"] @ x))


def _layers(w, name):
    return sorted({int(key.split(".")[2]) for key in w if key.startswith(f"layers.{name}.")})


def logits(weights, heads, content, sees, places, visible, queries=None):
    """Logits for each of `places`.

    `content`: list of (embedding row or the embedding itself, place or None); `sees[i]`: the indices that content i
    attends to; `visible[j]`: the indices of the content that query j attends to; `queries[j]`: what it asks with
    instead of [MASK].
    """
    w = {key: tensor.double() for key, tensor in weights.items()}
    table = w["embeddings.weight"]
    vocab = len(w["head.weight"])
    h = [row.double() if isinstance(row, torch.Tensor) else table[row] for row, _ in content]
    where = [place for _, place in content]
    for i in _layers(w, "self_dec"):
        n = f"layers.self_dec.{i}"
        normed = [_norm(x, w[f"{n}.attn_norm.weight"]) for x in h]
        q = [_heads_turn(w[f"{n}.attn.to_q.weight"] @ x, p, heads) for x, p in zip(normed, where, strict=True)]
        k = [_heads_turn(w[f"{n}.attn.to_k.weight"] @ x, p, heads) for x, p in zip(normed, where, strict=True)]
        v = [w[f"{n}.attn.to_v.weight"] @ x for x in normed]
        mixed = [_attend(q[a], [k[b] for b in sees[a]], [v[b] for b in sees[a]], heads) for a in range(len(h))]
        h = [x + w[f"{n}.attn.proj.weight"] @ m for x, m in zip(h, mixed, strict=True)]
        h = [x + _ffn(_norm(x, w[f"{n}.ffn_norm.weight"]), w, n) for x in h]
    h = [_norm(x, w["layers.norm.weight"]) for x in h]
    k = [_heads_turn(w["layers.to_k.weight"] @ x, p, heads) for x, p in zip(h, where, strict=True)]
    v = [w["layers.to_v.weight"] @ x for x in h]
    result = []
    for j, (place, seen) in enumerate(zip(places, visible, strict=True)):
        x = table[vocab + MASK_OFFSET] if queries is None else queries[j].double()
        for i in _layers(w, "cross_dec"):
            n = f"layers.cross_dec.{i}"
            q = _heads_turn(w[f"{n}.attn.to_q.weight"] @ _norm(x, w[f"{n}.attn_norm.weight"]), place, heads)
            x = x + w[f"{n}.attn.proj.weight"] @ _attend(q, [k[b] for b in seen], [v[b] for b in seen], heads)
            x = x + _ffn(_norm(x, w[f"{n}.ffn_norm.weight"]), w, n)
        result.append(w["head.weight"] @ _norm(x, w["norm.weight"]))
    return torch.stack(result)


def decoding_logits(weights, heads, *, label, ids, known, order, sizes, width, causal, queries=None):
    """The logits of every planned position, in order, when decoding arrived at `ids` (raster); one sample.

    Blocks enter one after the other: the class, the known tokens, then the tokens of each step. `queries`: for
    each position (raster), instead of [MASK].
    """
    vocab = len(weights["head.weight"])
    num_classes = len(weights["embeddings.weight"]) - vocab - 3
    row = vocab + CLASS_OFFSET + (num_classes if label is None else label)
    content, blocks = [(row, None)], [0]

    def enter(positions):
        block = blocks[-1] + 1
        for position in positions:
            content.append((int(ids[position]), divmod(position, width)))
            blocks.append(block)

    if known:
        enter(known)
    result, start = [], 0
    for size in sizes:
        step = order[start : start + size]
        start += size
        count = len(content)
        if causal:
            sees = [range(a + 1) for a in range(count)]
        else:
            sees = [[b for b in range(count) if blocks[b] <= blocks[a]] for a in range(count)]
        places = [divmod(position, width) for position in step]
        asked = None if queries is None else [queries[position] for position in step]
        result.append(logits(weights, heads, content, sees, places, [range(count)] * size, asked))
        enter(step)
    return torch.cat(result)


def guided(cond, uncond, plan):
    """Logits `[..., tokens of the plan, codes]` guided after the head, with the scale of each token's step."""
    scale = torch.tensor([s for s, size in zip(plan.scales, plan.sizes, strict=True) for _ in range(size)])
    return uncond + scale[:, None] * (cond - uncond)
