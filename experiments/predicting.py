"""Which error of a fit predicts the loss, and what a width per layer gains: docs/converting.md.

    python experiments/predicting.py runs/smollm2

Keys and values of a run are replaced by approximations (`lrkv_jax.lab.analysis`), fitted
to the weights alone or to what text shows of the inputs. Each one's errors in three metrics, and
the loss of the run's held-out texts with it, go into `--results`, a line of JSON each; what is
there is not measured again. Then two tables: how well the order of each metric's errors is that of
the losses, and the error of one latent as wide in each layer as serves all best.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
TOKENS, CONTEXT = 4096, 512  # of a text, and of a record
METRICS = {
    "weights": "‖W − Ŵ‖",
    "inputs": "‖C^½ (W − Ŵ)‖",
    "read": "‖C^½ (W − Ŵ) N‖",
}
FITS = ("svd", "mean_svd", "alternating", "gauge")
WHOLE = ("whole", "", 0)
STEP = 8  # of a latent's width


class Seen:
    """A run, its layers' heads, and what `tokens` of two texts show of their inputs."""

    def __init__(self, source: Path, context: int = CONTEXT, tokens: int = TOKENS):
        from lrkv_jax.interop import fits
        from lrkv_jax.interop.calibration import calibrations
        from lrkv_jax.interop.convert import OWN, SECOND, heads_of
        from lrkv_jax.interop.texts import texts
        from lrkv_jax.training.restore import load_run
        from lrkv_jax.training.token_batch import BatchFormat

        self.run = run = load_run(source)
        self.model = model = run.config.model
        self.groups = model.attention.key_heads(model)
        self.heads = [heads for heads, _ in heads_of(model, run.params)]
        names, how = (OWN, SECOND), BatchFormat.of(run.config, run.tokenizer.bos)
        self.texts = list(texts(
            names, run.config, run.tokenizer, context=context, learnt=tokens, heldout=tokens
        ))  # fmt: skip
        rows_NU = np.concatenate([text.learnt_NU for text in self.texts])
        self.calibrations = list(calibrations(model, run.params, rows_NU, how))
        self.roots = [fits.root(one.moment_DD, fits.FLOOR) for one in self.calibrations]

    def families(self, at: int) -> list[np.ndarray]:
        """A layer's keys and values, [G, D, K] each."""
        each = self.model.heads // self.groups
        return [self.heads[at].key_HDK[::each], self.heads[at].value_HDK[::each]]

    def readers(self, at: int) -> list[np.ndarray]:
        """What reads them, [G, K, K] each."""
        from lrkv_jax.interop import fits

        of_keys_GK = self.calibrations[at].of_keys(self.groups)
        of_keys_GKK = of_keys_GK[:, :, None] * np.eye(self.model.head_width)
        return [of_keys_GKK, fits.reader_of_values(self.heads[at].output_HKD, self.groups)]


def measure(seen: Seen, ranks: Sequence[int], results: Path) -> None:
    """Measure the approximations at these ranks that `results` lacks."""
    from lrkv_jax.interop.convert import losses

    known = {tuple(one["fit"]) for one in read(results)}
    results.parent.mkdir(parents=True, exist_ok=True)

    def keep(fit: tuple, made: list[list[np.ndarray]]) -> None:
        if fit in known:
            return
        attention = dict(seen.run.params["blocks"]["attention"])
        for name, totals in zip(("key", "value"), zip(*made, strict=True), strict=True):
            attention[name] = np.float32(np.stack(totals).swapaxes(1, 2))
        blocks = {**seen.run.params["blocks"], "attention": attention}
        changed = replace(seen.run, params={**seen.run.params, "blocks": blocks})
        found = {"errors": errors(seen, made), "loss": losses(seen.texts, changed)}
        with results.open("a") as file:
            file.write(json.dumps({"fit": fit, **found}) + "\n")
        print(fit, found, flush=True)

    layers = range(seen.model.layers)
    keep(WHOLE, [seen.families(at) for at in layers])
    for rank in ranks:
        for to in ("weights", "text"):
            if not {(fit, to, rank) for fit in FITS} <= known:
                made = [approximated(seen, at, rank, to) for at in layers]
                for fit in FITS:
                    keep((fit, to, rank), [one[fit] for one in made])


def approximated(seen: Seen, at: int, rank: int, to: str) -> dict[str, list[np.ndarray]]:
    """A layer's keys and values [G, D, K] in each approximation, fitted to weights or on text."""
    from lrkv_jax.lab.analysis import factorization
    from lrkv_jax.lab.analysis.activations import weighted

    heads, back_DD, each = seen.heads[at], np.eye(seen.model.width), seen.model.heads // seen.groups
    if to == "text":
        heads, back_DD = weighted(heads, seen.roots[at]), np.linalg.inv(seen.roots[at])
    both = heads.key_HDK, heads.value_HDK
    fits = (factorization.truncated_svd, factorization.mean_and_svd, factorization.alternating)
    made = [[fit(one, rank).total_HDK[::each] for one in both] for fit in fits]
    made.append(gauged(seen, heads, rank))
    return {name: [back_DD @ one for one in of] for name, of in zip(FITS, made, strict=True)}


def gauged(seen: Seen, heads, rank: int) -> list[np.ndarray]:
    """Keys and values [G, D, K] as `lrkv convert` fits them, in the gauge that suits them best."""
    from lrkv_jax.interop import fits

    G, K, free = seen.groups, seen.model.head_width, fits.freedom(seen.model)
    energy_HJ = np.sum(heads.query_HDK**2, axis=1).reshape(-1, 2, K // 2).sum(axis=1)
    reader_GK = fits.Calibration(np.eye(0), energy_HJ, heads.gain_K).of_keys(G)
    reader_GKK = fits.reader_of_values(heads.output_HKD, G)
    # What nothing reads, as all values at initialization, is still fitted.
    reader_GK += fits.FLOOR * (reader_GK.max() or 1.0)
    reader_GKK += fits.FLOOR * (np.abs(reader_GKK).max() or 1.0) * np.eye(K)
    each, both = seen.model.heads // G, (heads.key_HDK, heads.value_HDK)
    keys, values = (fits.Reduced.of(None, one[::each]) for one in both)
    made = (
        fits.shared_keys(keys.parts[0], keys.back_DM, reader_GK, rank, free=free),
        fits.shared_values(values.parts[0], values.back_DM, reader_GKK, rank),
    )
    return [(fit.shared_DK + fit.down_GDR @ fit.up_GRK) @ fit.gauge_GKK for fit in made]


def errors(seen: Seen, made: list[list[np.ndarray]]) -> dict[str, float]:
    """By metric, what `lrkv convert` chooses widths by, mean over layers."""
    from lrkv_jax.interop.convert import BALANCE

    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for at, new in enumerate(made):
        one = np.broadcast_to(np.eye(seen.model.head_width), seen.readers(at)[0].shape)
        for metric in METRICS:
            root_DD = np.eye(seen.model.width) if metric == "weights" else seen.roots[at]
            readers = seen.readers(at) if metric == "read" else (one, one)
            key, value = (
                np.sum((root_DD @ (was - now) @ N) ** 2) / np.sum((root_DD @ was @ N) ** 2)
                for was, now, N in zip(seen.families(at), new, readers, strict=True)
            )
            found[metric].append(BALANCE**2 * key + value)
    return {metric: float(np.mean(values)) for metric, values in found.items()}


def read(results: Path) -> list[dict]:
    """The lines that are kept."""
    return [json.loads(one) for one in results.read_text().splitlines()] if results.exists() else []


def table(lines: Sequence[dict]) -> str:
    """Each approximation's errors and losses, and how well the order of those is the losses'."""
    from scipy.stats import spearmanr

    from lrkv_jax.lab.report.tabulated import tabulated

    whole, *others = lines
    head = ["fit", "to", "rank", *METRICS.values(), *whole["loss"]]
    rows = []
    for one in others:
        figures = [f"{error:.3f}" for error in one["errors"].values()]
        rows.append([*map(str, one["fit"]), *figures, *(
            f"{one['loss'][text] - was:+.3f}" for text, was in whole["loss"].items()
        )])  # fmt: skip
    loss = [np.mean(list(one["loss"].values())) for one in others]
    ranks = [spearmanr([one["errors"][m] for one in others], loss).statistic for m in METRICS]
    rows.append(["rank correlation", "", "", *(f"{rank:.2f}" for rank in ranks), "", ""])
    return tabulated(head, rows, left=2)


def widths(seen: Seen, latents: Sequence[int]) -> str:
    """The error of one latent of a width in all layers, and of the best widths of the same bytes.

    What a wider latent takes away of a layer's error falls with its width, so giving each STEP to
    the layer that gains most is the best.
    """
    from lrkv_jax.interop import fits
    from lrkv_jax.interop.convert import BALANCE
    from lrkv_jax.lab.report.tabulated import tabulated

    left_LC = []
    for at in range(seen.model.layers):
        reduced = fits.Reduced.of(seen.calibrations[at].moment_DD, *seen.families(at))
        read_by = [part @ N for part, N in zip(reduced.parts, seen.readers(at), strict=True)]
        columns = [
            weight * np.concatenate(list(y_GMK), axis=1) / np.linalg.norm(y_GMK)
            for weight, y_GMK in zip((BALANCE, 1.0), read_by, strict=True)
        ]
        energies = np.linalg.svd(np.concatenate(columns, axis=1), compute_uv=False) ** 2
        left_LC.append(energies.sum() - np.concatenate([[0], np.cumsum(energies)])[::STEP])
    left_LC = np.stack(left_LC)
    headers = "latent", "error, one width", "error, best widths", "from", "to"
    rows = []
    for latent in latents:
        places_L = np.ones(len(left_LC), int)
        gains_LC = -np.diff(left_LC, axis=1, append=left_LC[:, -1:])
        for _ in range(len(left_LC) * (latent // STEP - 1)):
            places_L[np.argmax(gains_LC[np.arange(len(left_LC)), places_L])] += 1
        one, best = (
            left_LC[:, latent // STEP].mean(),
            left_LC[np.arange(len(left_LC)), places_L].mean(),
        )
        ends = STEP * places_L.min(), STEP * places_L.max()
        rows.append((str(latent), f"{one:.4f}", f"{best:.4f}", *map(str, ends)))
    return tabulated(headers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--latents", type=int, nargs="+", default=[128, 176, 224])
    parser.add_argument(
        "--results", type=Path, default=HERE / "results/converting/predicting.jsonl"
    )
    given = parser.parse_args()
    seen = Seen(given.run)
    print(widths(seen, given.latents), flush=True)
    measure(seen, given.ranks, given.results)
    print(table(read(given.results)))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
