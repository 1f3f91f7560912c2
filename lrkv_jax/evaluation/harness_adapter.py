"""EleutherAI's lm-evaluation-harness over a run: its tasks, answered by the cached decoder.

Importing this registers the model `lrkv` with the harness (https://github.com/EleutherAI/
lm-evaluation-harness, extra `harness`). No other module imports `lm_eval`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.harness_requests import (
    OPENING,
    ChatPrompt,
    GenerationSettings,
    grouped,
)
from lrkv_jax.inference.language_model import Draws, LanguageModel, cut
from lrkv_jax.training.restore import load_run

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as missing:
    raise LrkvError(
        f"the lm-evaluation-harness is not installed ({missing}): "
        'pip install -c constraints.txt -e ".[harness]"'
    ) from None

_ARGUMENTS = ("run", "step", "batch", "seed")


@register_model("lrkv")
class LrkvLM(LM):
    """The harness's model: log-likelihoods and texts of a `LanguageModel`.

    A text begins as the tokenizer has it, with BOS or without; an empty context is its
    prefix. A score depends on its question alone: requests share a prefill if they
    have the same question and context. info: what the harness writes next to its
    results.
    """

    def __init__(
        self, model: LanguageModel, *, seed: int = 0, info: Mapping[str, Any] | None = None
    ):
        super().__init__()
        self.model = model
        self._seed, self._info = seed, dict(info or {})
        self._opening = ""  # of the chats that were requested

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> LrkvLM:
        """`--model_args run=DIRECTORY,step=STEP,batch=N,seed=N`, and settings such as mesh.fsdp=8.

        Without `batch` the harness's --batch_size counts, which is 1 unless given. Its --device is
        PyTorch's ("cuda:0" unless given) and is not read: JAX takes all the devices that it has.
        Raises LrkvError for other arguments and for a run that cannot be read.
        """
        given = {key: value for key, value in arg_dict.items() if "." not in key}
        if "run" not in given or (unknown := given.keys() - set(_ARGUMENTS)):
            wrong = ", ".join(sorted(unknown)) + " unknown" if "run" in given else "no run"
            raise LrkvError(f"--model_args: {wrong}; use {', '.join(_ARGUMENTS)}")
        batch = given.get("batch") or (additional_config or {}).get("batch_size") or 1
        if not str(batch).isdecimal() or int(batch) < 1:
            raise LrkvError(f"--batch_size {batch}: use a whole number, 1 or more")
        overrides = [f"{key}={value}" for key, value in arg_dict.items() if "." in key]
        run = load_run(str(given["run"]), step=given.get("step"), overrides=overrides)
        info = {"run": str(given["run"]), "step": run.step, "batch": int(batch)}
        model = LanguageModel(run, batch=int(batch))
        return cls(model, seed=int(given.get("seed", 0)), info=info)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> LrkvLM:
        """`create_from_arg_obj` of "key=value,key=value"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log p in nats, and whether greedy decoding would write it."""
        pairs = [self._pair(*request.args) for request in requests]
        keys = [
            (request.task_name, request.doc_id, tuple(context))
            for request, (context, _) in zip(requests, pairs, strict=True)
        ]
        groups = grouped(keys)
        queries = [(pairs[group[0]][0], [pairs[i][1] for i in group]) for group in groups]
        with self._bar(len(queries), "log-likelihoods", disable_tqdm):
            scores = self.model.log_likelihoods(queries)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for group, row in zip(groups, scores, strict=True):
            for place, score in zip(group, row, strict=True):
                results[place] = (score.log_p, score.greedy)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return each whole text's log p in nats: every token counts once, after the
        tokenizer's prefix.

        The harness's windows: disjoint but the last, which reads as much as fits before
        what is left. An empty text has log p 0.
        """
        queries, owners = [], []
        for place, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.model.tokenizer.encode(request.args[0]).tolist(),
                prefix_token=self.model.tokenizer.prefix,
                max_seq_len=self.model.context,
                context_len=1,
            )
            for context, predicted in map(make_disjoint_window, windows):
                queries.append((context, [predicted]))
                owners.append(place)
        with self._bar(len(queries), "windows", disable_tqdm):
            scores = self.model.log_likelihoods(queries)
        results = [0.0] * len(requests)
        for place, (score,) in zip(owners, scores, strict=True):
            results[place] += score.log_p
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return each request's text up to its first stop, or a chat's answer with its calls.

        Prompts are cut and counted as `LanguageModel` does. Sampled texts depend on
        `seed` and the request's place among those with equal settings.
        """
        settings = [
            GenerationSettings.of(request.args[1], self.model.context) for request in requests
        ]
        kinds = [isinstance(request.args[0], ChatPrompt) for request in requests]
        results = [""] * len(requests)
        with self._bar(len(requests), "texts", disable_tqdm):
            for group in grouped(list(zip(settings, kinds, strict=True))):
                how, in_chat = settings[group[0]], kinds[group[0]]
                prompts = [self._prompt(requests[i].args[0]) for i in group]
                draws = Draws(how.sampling, self._seed)
                if in_chat:
                    answers = self.model.answers(prompts, how.max_new_tokens, draws)
                    texts = [cut(answer.text(self.model.chat), how.until) for (answer,) in answers]
                else:
                    drawn = self.model.continuations(prompts, how.max_new_tokens, how.until, draws)
                    texts = [text for (text,) in drawn]
                for place, text in zip(group, texts, strict=True):
                    results[place] = text
        return results

    @property
    def tokenizer_name(self) -> str:
        """The name that identifies a tokenizer in the harness's caches of prompts."""
        tokenizer = self.model.tokenizer
        return f"{Path(tokenizer.name).stem}-{tokenizer.fingerprint[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the chat format for the log. Raises LrkvError for a name: there is one format."""
        if isinstance(chat_template, str):
            raise LrkvError(f"--apply_chat_template {chat_template}: there is one format, no names")
        template = self.model.chat.template
        own = "lrkv_jax.data.chat" if template is None else template.source
        return own if chat_template else ""

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> ChatPrompt:
        """The conversation up to the start of the assistant's turn.

        Raises LrkvError for a model without ids for a chat, and for turns that do not alternate.
        """
        self.model.check_chat()
        prompt = ChatPrompt.of(self.model.chat, chat_history, answers=add_generation_prompt)
        self._opening = prompt[:OPENING]
        return prompt

    def get_model_info(self) -> dict[str, Any]:
        """Describe the run for the harness's results, with the number of prompts cut so far."""
        model = self.model
        more = {"tokenizer": model.tokenizer.name, "context": model.context}
        return {**self._info, **more, "truncated_prompts": model.truncated}

    def _prompt(self, context: str) -> list[int]:
        if isinstance(context, ChatPrompt):
            return [*context.head, *self.model.tokenizer.encode(context.begun).tolist()]
        self._check(context)
        return self.model.tokenizer.prompt(context)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not isinstance(context, ChatPrompt):
            self._check(context)
            return self.model.pair(context, continuation)
        # Text that begins the answer is cut from what follows by the same rule.
        return self.model.pair(context.begun, continuation, context.head)

    def _check(self, context: str) -> None:
        if self._opening and context.startswith(self._opening):
            raise LrkvError(
                "the harness made plain text of a chat's prompt: its frame would be lost; ask "
                "this task without --apply_chat_template"
            )

    @contextmanager
    def _bar(self, total: int, what: str, hidden: bool) -> Iterator[None]:
        """A progress bar for requests that are answered in batches."""
        with tqdm(total=total, desc=what, disable=hidden) as bar:
            start = self.model.done
            self.model.progress = lambda done: bar.update(done - start - bar.n)
            yield


def command_line(arguments: Mapping[str, Any], rest: Sequence[str]) -> None:
    """The harness's command `lm_eval run` over a run: `arguments` as `--model_args` has them.

    Raises LrkvError as `LrkvLM.create_from_arg_obj` does; SystemExit for the harness's bad options.
    """
    from lm_eval.__main__ import cli_evaluate

    # It forks to bootstrap errors, which a process that holds JAX must not do; the same alone.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    before = sys.argv
    model = ["--model", "lrkv", "--model_args", json.dumps(dict(arguments))]
    sys.argv = ["lrkv harness", *model, *rest]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
