"""Triton's interpreter makes an integer of an array with one element, which numpy no longer does, and rounds to float8
wrongly: it forgets the carry into the exponent and small numbers. `mend` helps."""

import numpy as np
import torch

DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def mend():
    """For tests whose kernels have loops of a length that is not known before, or float8. With a GPU: nothing to do."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float
    if patch.__name__ == "mended":
        return

    def mended(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def converted(data, source, target, rounding_mode):
        if "fp8e4nv" not in (source.name, target.name):
            return convert(data, source, target, rounding_mode)
        wide = torch.frombuffer(bytearray(data.tobytes()), dtype=DTYPES[source.name]).float()
        if target.name == "fp8e4nv":
            wide = wide.clamp(-448, 448)  # as a GPU does
        found = wide.to(DTYPES[target.name]).view(torch.uint8).numpy()
        return found.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(data.shape)

    interpreter._patch_lang_tensor, interpreter._convert_float = mended, converted
