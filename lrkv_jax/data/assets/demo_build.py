"""Writes the word problems of the demonstration sets, and lists every demonstration file's sha256.

    python -m lrkv_jax.data.assets.demo_build

The other files in `demo/` are written by hand: edit one, then run this for its sum. The same script
gives the same bytes: the numbers come from a fixed seed, and no question comes twice.
"""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

from lrkv_jax.data.assets import FOLDER
from lrkv_jax.data.calculator import calculate

DEMO_FOLDER = FOLDER / "demo"
TRAIN, TEST = 96, 24
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Maria", "Tom")
# A question, the lines of its solution, and the final number.
Solved = tuple[str, list[str], str]


def _worked(left: object, sign: str, right: object) -> tuple[str, str]:
    """A sum with its span, `48 / 2 = <<48/2=24>>24`, and its result."""
    result = calculate(f"{left}{sign}{right}") or ""
    return f"{left} {sign} {right} = <<{left}{sign}{right}={result}>>{result}", result


def _apples(rng: random.Random, name: str) -> Solved:
    bags, each, eaten = rng.randint(2, 9), rng.randint(3, 12), rng.randint(1, 5)
    first, total = _worked(bags, "*", each)
    second, left = _worked(total, "-", eaten)
    question = (
        f"{name} buys {bags} bags with {each} apples in each and eats {eaten} of the apples. "
        + rng.choice(("How many apples are left?", "How many apples remain in the bags?"))
    )
    return question, [f"{name} buys {first} apples.", f"Then {second} are left."], left


def _letters(rng: random.Random, name: str) -> Solved:
    april = 2 * rng.randint(6, 60)
    first, may = _worked(april, "/", 2)
    second, both = _worked(april, "+", may)
    question = (
        f"{name} wrote {april} letters to the President in April and half as many in May. "
        + rng.choice(
            ("How many letters is that in both months?", "How many letters were there in all?")
        )
    )
    return question, [f"In May {name} wrote {first} letters.", f"In all it is {second}."], both


def _wages(rng: random.Random, name: str) -> Solved:
    hour, hours, days = rng.randint(9, 24), rng.randint(4, 9), rng.randint(2, 6)
    first, day = _worked(hour, "*", hours)
    second, total = _worked(day, "*", days)
    question = f"{name} earns ${hour} an hour and works {hours} hours a day. " + rng.choice(
        (
            f"How many dollars does {name} earn in {days} days?",
            f"What is the pay for {days} days, in dollars?",
        )
    )
    return question, [f"In one day it is {first} dollars.", f"In all it is {second}."], total


def _budget(rng: random.Random, name: str) -> Solved:
    income, spent = 100 * rng.randint(30, 90), 100 * rng.randint(5, 29)
    years = rng.randint(2, 5)
    first, left = _worked(income, "-", spent)
    second, total = _worked(left, "*", years)
    question = f"A town takes in ${income:,} a year and spends ${spent:,} of it. " + rng.choice(
        (
            f"How many dollars does it save in {years} years?",
            f"After {years} such years, how many dollars has it saved?",
        )
    )
    final = f"{int(total):,}"  # with commas, as some of GSM8K's answers
    return question, [f"In a year it saves {first} dollars.", f"Then {second}."], final


def _change(rng: random.Random, name: str) -> Solved:
    cents, count = rng.choice((0.25, 0.5, 0.75, 1.25, 1.5, 2.5)), 2 * rng.randint(2, 6)
    paid = 20 + 20 * (cents * count > 20)
    first, cost = _worked(cents, "*", count)
    second, change = _worked(paid, "-", cost)
    question = (
        f"A flag costs ${cents:.2f}. {name} buys {count} flags and pays with ${paid}. "
        + rng.choice(
            ("How many dollars of change are given?", "How much money comes back, in dollars?")
        )
    )
    return question, [f"The flags cost {first} dollars.", f"The change is {second}."], change


def _cold(rng: random.Random, name: str) -> Solved:
    noon, hours, fall = rng.randint(1, 9), rng.randint(3, 6), rng.randint(2, 5)
    first, down = _worked(hours, "*", fall)
    second, night = _worked(noon, "-", down)
    question = (
        f"It is {noon} degrees at noon, and it gets {fall} degrees colder every hour. "
        + rng.choice(
            (
                f"How many degrees is it after {hours} hours?",
                f"What does the thermometer show {hours} hours later?",
            )
        )
    )
    return question, [f"It falls by {first} degrees.", f"So it is {second}."], night


def _votes(rng: random.Random, name: str) -> Solved:
    states, yes, no = rng.randint(3, 20), rng.randint(30, 80), rng.randint(5, 29)
    first, lead = _worked(yes, "-", no)
    second, total = _worked(lead, "*", states)
    question = f"In each of {states} towns {yes} people vote yes and {no} vote no. " + rng.choice(
        (
            "How many more people vote yes than no in all the towns?",
            "By how many votes does yes win in all?",
        )
    )
    return question, [f"In one town it is {first} more.", f"In all it is {second}."], total


def _share(rng: random.Random, name: str) -> Solved:
    people, each, extra = rng.randint(3, 8), rng.randint(4, 15), rng.randint(2, 9)
    books = people * each - extra
    first, total = _worked(books, "+", extra)
    second, share = _worked(total, "/", people)
    question = (
        f"A school has {books} books and gets {extra} more. It gives them to {people} classes in "
        "equal parts. "
        + rng.choice(("How many books does each class get?", "How many books are in one part?"))
    )
    return question, [f"The school has {first} books.", f"Each class gets {second}."], share


_KINDS: tuple[Callable[[random.Random, str], Solved], ...] = (
    *(_apples, _letters, _wages, _budget, _change, _cold, _votes, _share),
)


def problems(count: int, seed: int = 1776) -> list[dict[str, str]]:
    """`count` problems in GSM8K's schema, of each kind in turn."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        kind = _KINDS[len(found) % len(_KINDS)]
        question, lines, final = kind(rng, rng.choice(_NAMES))
        found[question] = "\n".join([*lines, f"#### {final}"])
    return [{"question": question, "answer": answer} for question, answer in found.items()]


def write(folder: Path = DEMO_FOLDER) -> None:
    """Writes gsm8k's two files and the SHA256SUMS of all in the folder, as sha256sum does."""
    made = problems(TRAIN + TEST)
    for split, rows in (("train", made[:TRAIN]), ("test", made[TRAIN:])):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"gsm8k-{split}.jsonl").write_text(lines)
    files = sorted(folder.glob("*.jsonl"))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    write()
