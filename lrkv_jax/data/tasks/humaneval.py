"""openai_humaneval: functions to complete from their docstring (Chen et al., arXiv 2107.03374).

Text alone: nothing here runs a program.
"""

import re
from dataclasses import dataclass
from typing import Any

from lrkv_jax.data.conversation import Conversation, exchange

_BLOCK = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Program:
    """A function to complete. prompt: its start; test: code that defines `check(candidate)`."""

    id: str
    prompt: str
    canonical_solution: str
    test: str
    entry_point: str


def example(row: dict[str, Any], id: str) -> Program:
    """A row as a program, under the set's id; its columns are the same on PyPI."""
    fields = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
    return Program(*(row[name] for name in fields))


def conversation(program: Program) -> Conversation:
    """The prompt as the user's message, prompt and solution as the answer (the recipe's)."""
    return exchange(program.prompt, f"{program.prompt}\n{program.canonical_solution}")


def extract_program(completion: str) -> str:
    """A completion's code: its first fenced block (``` or ```python), else all of it (recipe)."""
    block = _BLOCK.search(completion)
    return (block.group(1) if block else completion).strip()


def leading_imports(prompt: str) -> str:
    """The import lines before a prompt's first other code; comments between are passed over."""
    imports = []
    for line in map(str.strip, prompt.split("\n")):
        if line.startswith(("import ", "from ")):
            imports.append(line)
        elif line and not line.startswith("#"):
            break
    return "\n".join(imports)


def whole_program(program: Program, completion: str) -> str:
    """The program of a chat's completion: imports, its code, the test, the check (recipe).

    The completion is expected to hold the whole function, as the recipe's midtraining teaches.
    """
    imports, code = leading_imports(program.prompt), extract_program(completion)
    return f"{imports}\n\n{code}\n\n{program.test}\ncheck({program.entry_point})"
