"""Triton's interpreter makes an integer of an array with one element, which numpy no longer does; `mend` helps."""

import torch


def mend():
    """For tests whose kernels have loops of a length that is not known before. With a GPU there is nothing to do."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__name__ == "mended":
        return

    def mended(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
