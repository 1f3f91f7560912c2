"""Sequences that grow in one cache: text is appended, answers are decoded or scored, in turns.

Nothing that is cached is prefilled twice: a chat's next turn costs its own tokens, and the choices
of a question share its context.

B sequences  T positions  N steps of a call  C ids  V vocabulary
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from lrkv_jax.decode import programs
from lrkv_jax.decode import prompts as ragged
from lrkv_jax.decode.decoder import Decoder
from lrkv_jax.decode.sampling import Sampling
from lrkv_jax.errors import LrkvError
from lrkv_jax.nn.dtype import resolve_dtype

SHORTEST_SCORED = 4  # positions; longer continuations take the next power of two


class Session:
    """Up to `decoder.batch` sequences in the decoder's cache, each with its own length.

    cached [B]: tokens of each that are in the cache. A context manager: leaving it gives the cache
    back. Sequence i draws from (seed, draws[i], or i) and its positions.
    """

    def __init__(self, decoder: Decoder, *, seed: int = 0, draws: Sequence[int] | None = None):
        self._decoder = decoder
        self.cached = np.zeros(decoder.batch, np.int32)
        # Chosen, and not in the cache: decoding reads a token when it chooses the next one.
        self._waiting: list[list[int]] = [[] for _ in range(decoder.batch)]
        self._active_B = np.zeros(decoder.batch, bool)
        self._last_BD = np.zeros(
            (decoder.batch, decoder.config.width), resolve_dtype(decoder.config.dtype)
        )
        self._seed_2 = np.asarray(jax.random.key_data(jax.random.key(seed)))
        self._draw_B = np.arange(decoder.batch, dtype=np.int32)
        if draws is not None:
            self._draw_B[: len(draws)] = draws
        self._cache = decoder.take_cache()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Give the cache back to the decoder."""
        if self._cache is not None:
            self._decoder.give_back(self._cache)
            self._cache = None

    def room(self) -> int:
        """Tokens that still fit behind the longest sequence of those that were appended to last;
        between turns, of all."""
        used_B = self.cached + np.array([len(waiting) for waiting in self._waiting])
        return self._decoder.length - int(used_B[self._active_B].max(initial=0) or used_B.max())

    def append(self, tokens: Sequence[Sequence[int] | None]) -> None:
        """Put more tokens behind the sequences; those given None wait, and do not go on.

        One that has decoded can go on without more: give it [].

        Raises `LrkvError` for tokens that do not fit or that the model does not have.
        """
        pairs = zip(self._waiting, tokens, strict=False)
        rows = [[] if new is None else [*waiting, *new] for waiting, new in pairs]
        rows += [[]] * (self._decoder.batch - len(rows))
        if not any(rows):
            raise LrkvError("nothing to append: give one sequence a token or more")
        for number, row in enumerate(rows):
            if row:
                ragged.check_tokens(f"sequence {number}", row, self._decoder.config.vocabulary)
        added_B = np.array([len(row) for row in rows], np.int32)
        longest = int((self.cached + added_B).max())
        if longest > self._decoder.length:
            raise LrkvError(
                f"{longest} tokens do not fit a cache of {self._decoder.length}: make it longer"
            )
        self._active_B = added_B > 0
        first = not self.cached.any()
        cuts = ragged.pieces(int(added_B.max()), self._decoder.prefill_chunk)
        tokens_BT, _ = ragged.batched(rows, self._decoder.batch, sum(cuts[-1]))
        for start, size in cuts:
            self._cache, self._last_BD = self._decoder.run(
                programs.fill, self._cache, self._last_BD, tokens_BT[:, start : start + size],
                self.cached + np.int32(start), self.cached + added_B, first=first and start == 0,
            )  # fmt: skip
        self.cached = self.cached + added_B
        self._waiting = [
            [] if row else waiting for row, waiting in zip(rows, self._waiting, strict=True)
        ]

    def stream(
        self, new_tokens: int, *, sampling: Sampling | None = None, stop: Sequence[int] = ()
    ) -> Generator[Int[np.ndarray, "B"]]:
        """Go on with the sequences that were just appended to; as `Engine.stream`.

        The tokens of a stream that is left early, up to the last one yielded, stay.
        """
        ragged.check_tokens("stop", stop or (0,), self._decoder.config.vocabulary)
        if new_tokens < 1 or new_tokens > self.room():
            raise LrkvError(f"new_tokens = {new_tokens}: use 1 to {self.room()}, which still fit")
        said: list[list[int]] = [[] for _ in self._waiting]
        calls = self._calls(new_tokens, sampling or Sampling(), tuple(stop))
        try:
            with closing(calls):
                waiting = next(calls)
                while waiting is not None:
                    # The next call is on its way before this one's tokens are waited for.
                    ahead = next(calls, None)
                    tokens_NB, _, count = waiting
                    for tokens_B in np.asarray(tokens_NB)[:count]:
                        if (tokens_B < 0).all():
                            return
                        for row in np.flatnonzero(tokens_B >= 0):
                            said[row].append(int(tokens_B[row]))
                        yield tokens_B
                    waiting = ahead
        finally:
            # In a new array: the device may still be reading the old one.
            self.cached = self.cached + np.array([max(len(s) - 1, 0) for s in said], np.int32)
            self._waiting = [s[-1:] or w for s, w in zip(said, self._waiting, strict=True)]
            self._active_B = np.zeros_like(self._active_B)

    def next_log_p(self, ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Float32 log p of each of a sequence's `ids` coming next, after what was appended."""
        ids_BC = np.zeros((self._decoder.batch, max(map(len, ids))), np.int32)
        for row, some in enumerate(ids):
            ids_BC[row, : len(some)] = some
        log_p_BC = np.asarray(self._decoder.run(programs.next_log_p, self._last_BD, ids_BC))
        return [log_p_BC[row, : len(some)] for row, some in enumerate(ids)]

    def score(
        self, continuations: Sequence[Sequence[int]]
    ) -> tuple[list[Float[np.ndarray, "T"]], list[Bool[np.ndarray, "T"]]]:
        """Log p of every token of each continuation, and whether each is the likeliest.

        The sequences stay as they are: the next continuation starts where this one did.
        """
        lengths = [len(tokens) for tokens in continuations]
        if int(self.cached[: len(lengths)].max()) + max(lengths) > self._decoder.length:
            raise LrkvError(
                f"{max(lengths)} tokens of a continuation do not fit behind "
                f"{int(self.cached.max())} in a cache of {self._decoder.length}: make it longer"
            )
        for number, tokens in enumerate(continuations):
            ragged.check_tokens(f"continuation {number}", tokens, self._decoder.config.vocabulary)
        cuts = ragged.pieces(max(lengths), self._decoder.prefill_chunk, SHORTEST_SCORED)
        tokens_BT, _ = ragged.batched(continuations, self._decoder.batch, sum(cuts[-1]))
        last_BD, log_p, likeliest = self._last_BD, [], []
        for start, size in cuts:
            self._cache, last_BD, *scores = self._decoder.run(
                programs.score, self._cache, last_BD, tokens_BT[:, start : start + size],
                self.cached + np.int32(start),
            )  # fmt: skip
            log_p.append(scores[0])
            likeliest.append(scores[1])
        log_p_BT = np.concatenate([np.asarray(piece) for piece in log_p], axis=1)
        likeliest_BT = np.concatenate([np.asarray(piece) for piece in likeliest], axis=1)
        rows = list(enumerate(lengths))
        return [log_p_BT[i, :n] for i, n in rows], [likeliest_BT[i, :n] for i, n in rows]

    def forced_logits(self, forced_NB: Int[np.ndarray, "N B"]) -> Float[np.ndarray, "N B V"]:
        """Logits of steps that take the given tokens in place of sampled ones."""
        calls = self._calls(len(forced_NB), Sampling(), (), forced_NB)
        return np.concatenate([np.asarray(logits)[:count] for _, logits, count in calls])

    def _begin(self, forced_NB, how):
        """The state after the first choice, without what that is followed by, and its results."""
        # A waiting sequence writes behind its tokens, where nothing is read.
        lengths_B = np.minimum(self.cached, self._decoder.length - 1)
        forced_B = None if forced_NB is None else forced_NB[0]
        state, *result = self._decoder.run(
            programs.begin, self._last_BD, lengths_B, ~self._active_B, self._seed_2, self._draw_B,
            forced_B, **how,
        )  # fmt: skip
        return replace(state, cache=self._cache), *result

    def _calls(self, new_tokens, sampling, stop, forced_NB=None):
        """Start calls; of each, yield tokens [N, B], logits if forced, and the rows that count."""
        how = {"sampling": sampling, "stop": stop}
        most, done = self._decoder.steps_per_call, 1
        state, *result = self._begin(forced_NB, how)
        try:
            yield *result, 1
            while done < new_tokens:
                count = min(most, new_tokens - done)
                forced = None
                if forced_NB is not None:
                    forced = np.zeros((most, self._decoder.batch), np.int32)
                    forced[:count] = forced_NB[done : done + count]
                state, *result = self._decoder.run(
                    programs.steps, state, np.int32(count), forced, most=most, **how
                )
                yield *result, count
                done += count
        finally:
            self._cache = state.cache
