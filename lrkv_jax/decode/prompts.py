"""Ragged prompts as one padded batch, cut into pieces of a few sizes.

B sequences  T positions
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from lrkv_jax.errors import LrkvError

# The shortest piece; longer ones double, so that few prefill programs are ever compiled.
SHORTEST_PIECE = 32


def pieces(longest: int, chunk: int, shortest: int = SHORTEST_PIECE) -> list[tuple[int, int]]:
    """(start, size) of the pieces that cover `longest` positions: chunks, the last one shorter."""
    whole, rest = divmod(longest, chunk)
    cut = [(i * chunk, chunk) for i in range(whole)]
    if rest:
        size = shortest
        while size < rest:
            size *= 2
        cut.append((whole * chunk, min(size, chunk)))
    return cut


def check(
    prompts: Sequence[Sequence[int]], new_tokens: int, *, batch: int, length: int, vocabulary: int
) -> None:
    """Raise `LrkvError` for prompts that an engine of this batch, cache and model cannot take."""
    if not prompts or len(prompts) > batch:
        raise LrkvError(f"{len(prompts)} prompts for a batch of {batch}: give 1 to that")
    if new_tokens < 1:
        raise LrkvError(f"new_tokens = {new_tokens}: use 1 or more")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise LrkvError(f"prompt {row} is empty: start it with the BOS token")
        check_tokens(f"prompt {row}", prompt, vocabulary)
    longest = max(map(len, prompts))
    # The last new token is never written, but counting it keeps the rule simple.
    if longest + new_tokens > length:
        raise LrkvError(
            f"a prompt of {longest} tokens and {new_tokens} new ones do not fit a cache "
            f"of {length}: shorten the prompt or make the cache longer"
        )


def check_tokens(name: str, tokens: Any, vocabulary: int) -> None:
    """Raise `LrkvError` for a token id that the model does not have."""
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu":
        raise LrkvError(
            f"{name} holds {ids.dtype} values: give token ids, as a tokenizer makes them"
        )
    bad = ids[(ids < 0) | (ids >= vocabulary)]
    if bad.size:
        raise LrkvError(
            f"{name} has the token id {bad.flat[0]}, and the model's are 0 to {vocabulary - 1}: "
            "use the tokenizer that it was trained with"
        )


def batched(
    prompts: Sequence[Sequence[int]], batch: int, positions: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Rows padded at the end with 0, and their lengths; unused rows are one padding token."""
    tokens_BT = np.zeros((batch, positions), np.int32)
    lengths_B = np.ones(batch, np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
        lengths_B[row] = len(prompt)
    return tokens_BT, lengths_B
