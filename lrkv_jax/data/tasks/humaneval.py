"""openai_humaneval: functions to complete from their docstring (Chen et al., arXiv 2107.03374).

Text alone: nothing here runs a program.
"""

import re
from dataclasses import dataclass

from lrkv_jax.data.conversation import Conversation, exchange
from lrkv_jax.data.tables import Schema
from lrkv_jax.errors import LrkvError

_BLOCK = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Program:
    """A function to complete. prompt: its start; test: code that defines `check(candidate)`."""

    id: str
    prompt: str
    canonical_solution: str
    test: str
    entry_point: str


class HumanEvalRow(Schema):
    """`task_id, prompt, canonical_solution, test, entry_point`, on the hub and on PyPI alike."""

    task_id: str
    prompt: str
    canonical_solution: str
    test: str
    entry_point: str


def example(row: HumanEvalRow, id: str) -> Program:
    """A row as a program, under the set's own id.

    Raises LrkvError for an entry point that is no name or is not defined in the prompt.
    """
    name = row.entry_point
    if not name.isidentifier() or not re.search(rf"^def {name}\b", row.prompt, re.MULTILINE):
        raise LrkvError(f"column 'entry_point' is {name!r}: the prompt defines no such function")
    return Program(row.task_id, row.prompt, row.canonical_solution, row.test, name)


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
    """What to run for a chat's completion: imports, its code, the test, the check (recipe).

    The completion is expected to hold the whole function, as the recipe's midtraining teaches.
    """
    imports, code = leading_imports(program.prompt), extract_program(completion)
    return f"{imports}\n\n{code}\n\n{program.test}\ncheck({program.entry_point})"
